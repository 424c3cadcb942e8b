"""Reading and writing files that the user named; errors are one line that names the file and the fault."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlx_llama3.errors import UserError

# A clone without git-lfs has such files in place of the large ones.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_bytes(path: Path, count: int = -1) -> bytes:
    """The content of a file, or its first `count` bytes. Raises `UserError` if it is missing or cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(count)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if content.startswith(_LFS_POINTER):
        raise UserError(f"{path}: is a pointer of git-lfs, not the file itself; run `git lfs pull` in its folder")
    return content


def check_weights_file(path: Path) -> None:
    """Raise `UserError` unless `path` is a plain file that can be read, and no pointer of git-lfs."""
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path}: is a link to a file that is gone; download the model again")
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is {'a folder' if path.is_dir() else 'no plain file'}; expected a file of weights")
    read_bytes(path, len(_LFS_POINTER))


def read_text(path: Path) -> str:
    """The text of a file, without a byte order mark. Raises `UserError` as `read_bytes`, or if it is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_some_text(path: Path) -> str:
    """As `read_text`; also raises `UserError` if the file holds nothing but white space."""
    text = read_text(path)
    if not text.strip():
        raise UserError(f"{path} is empty")
    return text


def check_place(path: Path) -> None:
    """Raise `UserError` if a file cannot be written. Call it before the work whose result the file will hold."""
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder; name a file")
        if not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}; make it, or name another file")
        writable = os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError as error:  # the name is too long, or its folder may not be searched
        raise UserError(f"{path}: cannot be written: {error.strerror}; name another file") from error
    if not writable:
        raise UserError(f"{path}: cannot be written: permission denied; name another file")


@contextmanager
def replacing(path: Path, ending: str = "") -> Iterator[Path]:
    """Yield a temporary file beside `path`, which replaces `path` at the end, or is removed if the block fails.

    ending: a suffix for the temporary name, for a writer that requires one. Raises what the block raises, and
    `OSError`.
    """
    partial = path.with_name(f".{path.name}.partial{ending}")
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):  # a name that was too long to be written is also too long to be removed
            partial.unlink(missing_ok=True)


def parse_json(text: str | bytes, source: object) -> Any:
    """Parse JSON; bytes may be UTF-8, UTF-16 or UTF-32. Raises `UserError` that names `source`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, not Unicode, or nested too deeply
        raise UserError(f"{source} is not JSON: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `UserError` if the file is missing, unreadable or holds no JSON object."""
    value = parse_json(read_bytes(path), path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
