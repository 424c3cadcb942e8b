"""A file that appears whole or not at all: written into a hidden sibling, flushed, renamed at the end."""

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from convert.storage.staged_folder import disk_full_told, flush
from mlx_llama3.errors import UserError
from mlx_llama3.system.locks import try_lock


@contextmanager
def staged_file(target: Path, *, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Give a file to write into; it becomes `target` if the block ends without an exception.

    The sibling is locked while its process lives, so a later run recognises what a killed one left, and removes it.

    Raises:
        UserError: `target` exists (and `overwrite` is not set), is a folder, or its folder cannot be written; the disk
            became full.
    """
    check_file_target(target, overwrite=overwrite)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        partial.touch()
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}; choose another target") from error
    try:
        with disk_full_told(target), open(partial, "wb") as file:
            try_lock(file)  # nobody else knows of this file yet
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush(target.parent)


def check_file_target(target: Path, *, overwrite: bool) -> None:
    """UserError if `target` exists and may not, or must not, be replaced."""
    if target.is_dir() or (target.exists() and not overwrite):
        hint = "give the name of a file" if target.is_dir() else "give another, or --overwrite to replace it"
        raise UserError(f"{target}: exists already; {hint}")


def _remove_leftovers(target: Path) -> None:
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        with open(leftover, "rb") as file:
            if not try_lock(file):
                raise UserError(f"{target}: another conversion is writing it now; wait for it")
            leftover.unlink()
