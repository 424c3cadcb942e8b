"""Saved conversations: one JSON file each, the output of `Conversation.to_json` with a title added."""

import json
import os
import re
import sys
from pathlib import Path

from mlx_llama3.conversation.saved import write_file
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import read_text

_ID = re.compile(r"[0-9a-f]{16}")
_TITLE_LENGTH = 60


def data_dir() -> Path:
    """The folder for the user's data, which may not exist: `MLX_LLAMA3_DATA`, or the platform's standard folder."""
    if chosen := os.environ.get("MLX_LLAMA3_DATA"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlx-llama3"
    xdg = Path(os.environ.get("XDG_DATA_HOME", ""))
    # The XDG specification says to ignore relative paths.
    return (xdg if xdg.is_absolute() else Path.home() / ".local" / "share") / "mlx-llama3"


def titles() -> list[tuple[str, str]]:
    """(title, id) of all saved conversations, newest first. Other files are ignored."""
    entries = []
    for path in _folder().glob("*.json"):
        if _ID.fullmatch(path.stem):
            try:
                entries.append((path.stat().st_mtime, _title(json.loads(path.read_text(encoding="utf-8"))), path.stem))
            except (OSError, ValueError):
                continue  # a damaged file must not hide the others; opening it raises the error
    return [(title, saved_id) for _, title, saved_id in sorted(entries, reverse=True)]


def write(saved_id: str, title: str, text: str) -> None:
    """Write a conversation; text: from `Conversation.to_json`. Raises `UserError` if it cannot be written."""
    _folder().mkdir(parents=True, exist_ok=True)
    content = json.loads(text) | {"title": title}
    write_file(_path(saved_id), json.dumps(content, ensure_ascii=False, indent=2) + "\n")


def read(saved_id: str) -> tuple[str, str]:
    """(title, text for `Conversation.from_json`). Raises `UserError` if the file is missing or not a conversation."""
    text = read_text(_path(saved_id))
    try:
        return _title(json.loads(text)), text
    except json.JSONDecodeError:
        raise UserError(f"{_path(saved_id)} is not JSON: the file is damaged") from None


def rename(saved_id: str, title: str) -> str:
    """Change the title of a saved conversation; returns the shortened title that was saved."""
    if not title.strip():
        raise UserError("the title is empty")
    _, text = read(saved_id)
    title = shortened(title)
    write(saved_id, title, text)
    return title


def delete(saved_id: str) -> None:
    """Delete a saved conversation, if it exists."""
    _path(saved_id).unlink(missing_ok=True)


def exists(saved_id: str) -> bool:
    """Whether a conversation is saved under this id."""
    return _ID.fullmatch(saved_id) is not None and _path(saved_id).is_file()


def shortened(text: str) -> str:
    """`text` as one line of at most 60 characters."""
    line = " ".join(text.split())
    return line if len(line) <= _TITLE_LENGTH else line[: _TITLE_LENGTH - 1].rstrip() + "…"


def _folder() -> Path:
    return data_dir() / "conversations"


def _path(saved_id: str) -> Path:
    # Ids come from the browser: anything else must not become a path.
    if not _ID.fullmatch(saved_id):
        raise UserError("there is no such conversation")
    return _folder() / f"{saved_id}.json"


def _title(content: object) -> str:
    """The title in a saved file, or else its first message."""
    if not isinstance(content, dict):
        raise UserError("a saved conversation must be a JSON object")
    messages = content.get("messages") or [{}]
    return shortened(str(content.get("title") or messages[0].get("content") or "Untitled"))
