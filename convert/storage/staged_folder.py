"""A folder that appears whole or not at all.

Everything is written into a hidden sibling, flushed, and renamed at the end. The sibling is locked while its process
lives, so a later run recognises what a killed one left behind, and removes it.
"""

import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_llama3.errors import UserError
from mlx_llama3.system.locks import try_lock


@contextmanager
def staged_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give an empty folder to write into; it becomes `target` if the block ends without an exception.

    An existing `target` is refused, or with `overwrite` replaced at the end and not before. What the block leaves open
    must be flushed; the folder itself and the rename are flushed here.

    Raises:
        UserError: `target` exists, or its parent cannot be written; the disk became full.
    """
    target = Path(os.path.abspath(target))
    _clean(target)
    check_folder_target(target, overwrite=overwrite)
    staging = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}; choose another target") from error
    lock = os.open(staging, os.O_RDONLY)
    try:
        try_lock(lock)
        with disk_full_told(target):
            yield staging
            for path in staging.rglob("*"):
                flush(path)
            flush(staging)
        _replace(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(lock)


@contextmanager
def disk_full_told(target: Path) -> Iterator[None]:
    """Say of which target the disk became full: the system's error for a write names no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"{target}: the disk is full; make room, or choose a target on another disk") from error


def check_disk(target: Path, needed: int) -> None:
    """UserError if the disk on which `target` will lie has less than `needed` bytes free."""
    place = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(f"{target}: needs {needed / 1e9:.2f} GB, but the disk has {free / 1e9:.2f} GB free; make room")


def check_folder_target(target: Path, *, overwrite: bool) -> None:
    """UserError if `target` exists and may not, or must not, be replaced."""
    if not target.exists() and not target.is_symlink():
        return
    if not overwrite:
        raise UserError(f"{target}: exists already; give another target, or --overwrite to replace it")
    # Whoever names the wrong folder should not lose it.
    if not target.is_dir() or target.is_symlink() or (any(target.iterdir()) and not (target / "config.json").exists()):
        raise UserError(f"{target}: is not a model folder, so it is not overwritten; give another target")


def _replace(staging: Path, target: Path) -> None:
    """Rename `staging` to `target`; a folder that is there steps aside first and is deleted last."""
    aside = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    if target.exists():
        target.rename(aside)
    staging.rename(target)
    flush(target.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _clean(target: Path) -> None:
    """Remove what dead runs left beside `target`; bring back a folder that stepped aside for one that never came."""
    for aside in target.parent.glob(f".{glob.escape(target.name)}.replaced-*"):
        if target.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(target)
    for staging in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        lock = os.open(staging, os.O_RDONLY)
        try:
            if not try_lock(lock):
                raise UserError(f"{target}: another conversion is writing it now; wait for it")
            shutil.rmtree(staging)
        finally:
            os.close(lock)


def flush(path: Path) -> None:
    """Have a file, or the entries of a folder, written to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
