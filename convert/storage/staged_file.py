"""A file that appears whole or not at all: written into a hidden sibling, flushed, renamed at the end."""

import fcntl
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from convert.storage.staged_folder import disk_full_told
from mlx_llama3.errors import UserError


@contextmanager
def staged_file(target: Path, *, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Give a file to write into; it becomes `target` if the block ends without an exception.

    The sibling is locked while its process lives, so a later run recognises what a killed one left, and removes it.

    Raises:
        UserError: `target` exists (and `overwrite` is not set), is a folder, or its folder cannot be written; the disk
            became full.
    """
    check_target(target, overwrite=overwrite)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        partial.touch()
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}; choose another target") from error
    try:
        with disk_full_told(target), open(partial, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check_target(target: Path, *, overwrite: bool) -> None:
    """UserError if `target` exists and may not, or must not, be replaced."""
    if target.is_dir() or (target.exists() and not overwrite):
        hint = "give the name of a file" if target.is_dir() else "give another, or --overwrite to replace it"
        raise UserError(f"{target}: exists already; {hint}")


def _remove_leftovers(target: Path) -> None:
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        with open(leftover, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{target}: another conversion is writing it now; wait for it") from None
            leftover.unlink()
