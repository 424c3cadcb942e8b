"""What `facts.json` records of MLX on macOS, read from its wheels: `python -m tests.mac.facts FOLDER`.

FOLDER gets the wheels of the recorded version from PyPI, unless it has them; 45 MB. The values of `device_info` are
those of one real chip, an M1 with 16 GB; its keys, and the other facts, are in the library.
"""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.mac.gpu import FACTS

_SHORTEST = 6  # characters of a text in the library


class NoWheel(Exception):
    """The wheels for macOS could not be fetched."""


def fetch(folder: Path, version: str) -> list[Path]:
    """The wheels `mlx` and `mlx-metal` of this version. Raises `NoWheel` with pip's last line."""
    folder.mkdir(parents=True, exist_ok=True)
    if len(found := sorted(folder.glob(f"mlx*-{version}-*.whl"))) == 2:
        return found
    options = ["--only-binary=:all:", "--platform", "macosx_14_0_arm64", "--python-version", "3.11", "--no-deps"]
    names = [f"{name}=={version}" for name in ("mlx", "mlx-metal")]
    command = [sys.executable, "-m", "pip", "download", "-q", *options, "-d", str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoWheel(f"no wheel of MLX {version} for macOS: {done.stderr.strip().splitlines()[-1]}")
    return sorted(folder.glob(f"mlx*-{version}-*.whl"))


def differences(wheels: list[Path], facts: dict) -> list[str]:
    """What these wheels say otherwise than `facts`, one line each."""
    files = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            files |= {name: archive.read(name) for name in archive.namelist() if name.endswith(("_.pyi", "mlx.dylib"))}
    stub = next(text for name, text in files.items() if name.endswith("core/__init__.pyi")).decode()
    library = next(data for name, data in files.items() if name.endswith("libmlx.dylib"))
    strings = set(re.findall(rb"[\x20-\x7e]{%d,}" % _SHORTEST, library))
    return [*_of_stub(stub, facts), *_of_library({text.decode() for text in strings}, facts)]


def _of_stub(stub: str, facts: dict) -> list[str]:
    signature = re.search(r"def device_info\(.*\) -> (.*):", stub)
    found = signature and signature[1]
    wanted = facts["device_info_type"]
    return [] if found == wanted else [f"device_info gives {found}, recorded is {wanted}"]


def _of_library(strings: set[str], facts: dict) -> list[str]:
    wanted = [*facts["device_info"], facts["wired_limit_error"], facts["kernel_on_cpu_error"], facts["tf32_variable"]]
    return [f"the library has no text {text!r}" for text in wanted if text not in strings]


def main(folder: Path) -> int:
    """Compare, and print what differs."""
    lines = differences(fetch(folder, FACTS["mlx"]), FACTS)
    print("\n".join(lines) or f"MLX {FACTS['mlx']} on macOS is as recorded")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
