"""A file that appears complete or not at all: it is written under a hidden name, flushed, then renamed."""

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from convert.storage.staged_folder import disk_errors_told, flush
from mlx_llama3.errors import UserError
from mlx_llama3.system.locks import try_lock


@contextmanager
def staged_file(target: Path, *, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Open a partial file for writing; it becomes `target` if the block ends without an exception.

    The partial file is locked while its process lives. A later run removes partial files without a lock, which a killed
    process has left.

    Raises:
        UserError: `target` exists (and `overwrite` is not set), is a folder, is being written by another process, or
            its folder is not writable; the disk is full.
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
        with disk_errors_told(target), open(partial, "wb") as file:
            try_lock(file)  # always succeeds: the file is new
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush(target.parent)


def check_file_target(target: Path, *, overwrite: bool) -> None:
    """Raise `UserError` if `target` is a folder, or exists and `overwrite` is not set."""
    with disk_errors_told(target):  # the name is too long, or a folder above may not be searched
        refused = target.is_dir() or (target.exists() and not overwrite)
    if refused:
        hint = "give the name of a file" if target.is_dir() else "give another, or --overwrite to replace it"
        raise UserError(f"{target}: exists already; {hint}")


def _remove_leftovers(target: Path) -> None:
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        if leftover.is_symlink() or not leftover.is_file():
            continue  # not ours
        with open(leftover, "rb") as file:
            if not try_lock(file):
                raise UserError(f"{target}: another conversion is writing it now; wait for it")
            leftover.unlink()
