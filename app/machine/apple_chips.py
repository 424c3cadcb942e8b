"""How many bytes a second Apple's chips move between memory and GPU, from the technical specifications of the Macs."""

import json
import re
import subprocess

# 10**9 bytes a second by name. Where a name was sold with two memory systems: by the least number of GPU cores.
BANDWIDTH: dict[str, float | dict[int, float]] = {
    "M1": 68.25,
    "M1 Pro": 200,
    "M1 Max": 400,
    "M1 Ultra": 800,
    "M2": 100,
    "M2 Pro": 200,
    "M2 Max": 400,
    "M2 Ultra": 800,
    "M3": 100,
    "M3 Pro": 150,
    "M3 Max": {30: 300, 40: 400},
    "M3 Ultra": 819,
    "M4": 120,
    "M4 Pro": 273,
    "M4 Max": {32: 410, 40: 546},
    "M5": 153,
    "M5 Pro": 307,
    "M5 Max": {32: 460, 40: 614},
}


def bandwidth(chip: str, cores: int | None = None) -> float | None:
    """10**9 bytes a second of a chip, as "Apple M2 Pro"; None if it is not in the table.

    cores: of its GPU, which tell two chips of one name apart; None asks the system, where that is needed.
    """
    name = re.sub(r"^Apple ", "", chip).strip()
    found = BANDWIDTH.get(name)
    if not isinstance(found, dict):
        return found
    cores = gpu_cores() if cores is None else cores
    return None if cores is None else found.get(max((least for least in found if least <= cores), default=0))


def gpu_cores() -> int | None:
    """How many cores the GPU has, as macOS says; None if it does not."""
    command = ["/usr/sbin/system_profiler", "SPDisplaysDataType", "-json"]
    try:
        said = subprocess.run(command, capture_output=True, timeout=20, check=True).stdout
        return next(
            int(each["sppci_cores"]) for each in json.loads(said)["SPDisplaysDataType"] if "sppci_cores" in each
        )
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, StopIteration):
        return None
