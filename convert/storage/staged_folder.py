"""A folder that appears complete or not at all.

It is written under a hidden name beside the target (the staging folder), flushed, then renamed. The staging folder is
locked while its process lives. A later run removes staging folders without a lock, which a killed process has left.
"""

import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from convert.storage.overwriting import carry_over
from mlx_llama3.errors import UserError
from mlx_llama3.system.locks import try_lock


@contextmanager
def staged_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Make an empty folder to write into; it becomes `target` if the block ends without an exception.

    An existing `target` is refused. With `overwrite` a model in it is replaced at the end, and all else is carried over
    (`overwriting`). Files, folder and rename are flushed to the disk here; the block itself must flush the buffers of
    files that it leaves open.

    Raises:
        UserError: `target` exists and may not be replaced, is being written by another process, or its parent is not
            writable; the disk is full.
    """
    target = Path(os.path.abspath(target))
    with disk_errors_told(target):
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
        with disk_errors_told(target):
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
def disk_errors_told(target: Path) -> Iterator[None]:
    """Turn the system's errors into a `UserError` that names the file, or the target if the system names none."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{target}: the disk is full; make room, or choose a target on another disk") from error
        file = error.filename or target
        raise UserError(
            f"{file}: {error.strerror or error}; check the file and its folder, or choose another"
        ) from error


def check_disk(target: Path, needed: int) -> None:
    """Raise `UserError` if the disk of `target` has less than `needed` bytes free."""
    with disk_errors_told(target):
        place = next(folder for folder in target.absolute().parents if folder.exists())
        free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(f"{target}: needs {needed / 1e9:.2f} GB, but the disk has {free / 1e9:.2f} GB free; make room")


def check_folder_target(target: Path, *, overwrite: bool) -> None:
    """Raise `UserError` if `target` exists and `overwrite` is not set, or if it is neither a model folder nor empty."""
    with disk_errors_told(target):  # the name is too long, or a folder above may not be searched
        exists = target.exists() or target.is_symlink()
    if not exists:
        return
    if not overwrite:
        raise UserError(f"{target}: exists already; give another target, or --overwrite to replace it")
    # A folder of anything else is not replaced: its name may be a mistake.
    with disk_errors_told(target):
        plain = target.is_dir() and not target.is_symlink()
        if not plain or (any(target.iterdir()) and not (target / "config.json").exists()):
            raise UserError(f"{target}: is not a model folder, so it is not overwritten; give another target")


def _replace(staging: Path, target: Path) -> None:
    """Rename `staging` to `target`; an existing `target` is renamed first, and carried over and deleted last."""
    aside = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    if target.exists():
        target.rename(aside)
    staging.rename(target)
    flush(target.parent)
    if aside.exists():
        carry_over(aside, target)
        flush(target)


def _clean(target: Path) -> None:
    """Remove what dead processes left beside `target`; restore a `target` that one had renamed but not yet replaced."""
    for aside in target.parent.glob(f".{glob.escape(target.name)}.replaced-*"):
        if aside.is_symlink() or not aside.is_dir():
            continue  # not ours
        if target.exists():
            carry_over(aside, target)
        else:
            aside.rename(target)
    for staging in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        if staging.is_symlink() or not staging.is_dir():
            continue
        lock = os.open(staging, os.O_RDONLY)
        try:
            if not try_lock(lock):
                raise UserError(f"{target}: another conversion is writing it now; wait for it")
            shutil.rmtree(staging)
        finally:
            os.close(lock)


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
