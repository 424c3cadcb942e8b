"""A text that the person gives as a file."""

from pathlib import Path

from mlx_llama3.errors import UserError


def read_text(path: Path) -> str:
    """The whole file; UserError if it cannot be read, is not UTF-8 or is empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not text in UTF-8") from error
    if not text.strip():
        raise UserError(f"{path}: is empty")
    return text
