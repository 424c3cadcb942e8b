"""Saved conversations on disk: `/save`, `/load`, `--resume`."""

from contextlib import suppress
from pathlib import Path

from mlx_llama3 import saved_conversation
from mlx_llama3.errors import UserError


def read(path: Path) -> str:
    """The text of a saved conversation. Raises `UserError` that names the file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the conversation: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a saved conversation: it is not UTF-8 text") from error


def write(path: Path, text: str) -> None:
    """Write the whole file or nothing. Raises `UserError` rather than replace what is not a saved conversation."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        if path.exists():
            _check_saved(path)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # a name that was too long to be written is also too long to be removed
            partial.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot save the conversation: {error.strerror}") from error


def _check_saved(path: Path) -> None:
    try:
        saved_conversation.load(read(path), str(path))
    except UserError as error:
        raise UserError(f"{path} exists and is not a saved conversation; choose another name") from error
