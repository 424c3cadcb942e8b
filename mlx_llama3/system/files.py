"""Files that a person named: an error says in one line which file it is and what is wrong with it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlx_llama3.errors import UserError


def read_bytes(path: Path) -> bytes:
    """The whole file. Raises `UserError` if it is missing or closed to us."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def read_text(path: Path) -> str:
    """The whole file, which must be UTF-8; a byte order mark at its start is left out. Raises `UserError`."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_some_text(path: Path) -> str:
    """As `read_text`; raises `UserError` for a file that holds nothing but white space, too."""
    text = read_text(path)
    if not text.strip():
        raise UserError(f"{path} is empty")
    return text


def check_place(path: Path) -> None:
    """Raise `UserError` for a file that cannot be written, before the work is done whose result it is to hold."""
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder; name a file")
        if not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}; make it, or name another file")
        closed = not os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError as error:  # the name is too long, or lies in a folder that may not be looked into
        raise UserError(f"{path}: cannot be written: {error.strerror}; name another file") from error
    if closed:
        raise UserError(f"{path}: cannot be written: permission denied; name another file")


@contextmanager
def replacing(path: Path, ending: str = "") -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place at the end; of what fails before, nothing is left.

    ending: of its name, for a writer that wants one. Raises what the block raises, and `OSError`.
    """
    partial = path.with_name(f".{path.name}.partial{ending}")
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):  # a name that was too long to be written is also too long to be removed
            partial.unlink(missing_ok=True)


def parse_json(text: str | bytes, source: object) -> Any:
    """The value that JSON text stands for; bytes may be UTF-8, -16 or -32. Raises `UserError` that names `source`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, not Unicode, or nested without an end
        raise UserError(f"{source} is not JSON: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a file. Raises `UserError` naming it if it is missing, unreadable or something else."""
    value = parse_json(read_bytes(path), path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
