"""Locks between processes (`flock`), which the system releases however a process ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of the file `path`, which is created if needed; wait for other processes. Raises `OSError`."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file releases the lock
        yield


def try_lock(file: IO | int) -> bool:
    """Lock an open file or folder until it is closed; False if another process holds the lock. Raises `OSError`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
