"""Saved conversations on disk: `/save`, `/load`, `--resume`."""

from pathlib import Path

from mlx_llama3.conversation import saved as saved_conversation
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import replacing


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
    try:
        if path.exists():
            _check_saved(path)
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot save the conversation: {error.strerror}") from error


def _check_saved(path: Path) -> None:
    try:
        saved_conversation.load(read(path), str(path))
    except UserError as error:
        raise UserError(f"{path} exists and is not a saved conversation; choose another name") from error
