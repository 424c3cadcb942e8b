"""Locks between processes (`flock`), which the system releases however a process ends."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_POLL_SECONDS = 0.05


@contextmanager
def exclusive(path: Path, *, seconds: float | None = None) -> Iterator[None]:
    """Hold the lock of the file `path`, which is created if needed; wait for other processes.

    seconds: the longest wait; None: no limit. Raises `OSError`, and its `TimeoutError` after that time.
    """
    with path.open("w", encoding="utf-8") as file:
        if seconds is None:
            fcntl.flock(file, fcntl.LOCK_EX)  # closing the file releases the lock
        else:
            _lock_within(seconds, file)
        yield


def _lock_within(seconds: float, file: IO) -> None:
    end = time.monotonic() + seconds
    while not try_lock(file):
        if time.monotonic() > end:
            raise TimeoutError(f"another process holds {file.name}")
        time.sleep(_POLL_SECONDS)


def try_lock(file: IO | int) -> bool:
    """Lock an open file or folder until it is closed; False if another process holds the lock. Raises `OSError`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
