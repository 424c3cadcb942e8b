"""Locks between processes (`flock`): they end with the process that holds them, however it ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of the file `path`, made if need be; wait while another process holds it. Raises `OSError`."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file lets go of it
        yield


def try_lock(file: IO | int) -> bool:
    """Lock an open file or folder until it is closed; False if another process holds the lock. Raises `OSError`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
