"""Saved conversations: one JSON file each, as `Conversation.to_json` writes it, with a title beside."""

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
    """The folder (it need not exist) for what a person makes here: `MLX_LLAMA3_DATA`, or the platform's usual place."""
    if chosen := os.environ.get("MLX_LLAMA3_DATA"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlx-llama3"
    xdg = Path(os.environ.get("XDG_DATA_HOME", ""))
    # The XDG specification has relative paths ignored.
    return (xdg if xdg.is_absolute() else Path.home() / ".local" / "share") / "mlx-llama3"


def titles() -> list[tuple[str, str]]:
    """(title, id) of all saved conversations, the one written last first. Files of another kind are left aside."""
    found = []
    for path in _folder().glob("*.json"):
        if _ID.fullmatch(path.stem):
            try:
                found.append((path.stat().st_mtime, _title(json.loads(path.read_text(encoding="utf-8"))), path.stem))
            except (OSError, ValueError):
                continue  # one damaged file must not hide the others; opening it by name would tell
    return [(title, saved_id) for _, title, saved_id in sorted(found, reverse=True)]


def write(saved_id: str, title: str, text: str) -> None:
    """Keep a conversation (`Conversation.to_json`). Raises `UserError` if the disk does not take it."""
    _folder().mkdir(parents=True, exist_ok=True)
    content = json.loads(text) | {"title": title}
    write_file(_path(saved_id), json.dumps(content, ensure_ascii=False, indent=2) + "\n")


def read(saved_id: str) -> tuple[str, str]:
    """(title, text for `Conversation.from_json`). Raises `UserError` if it is gone or no conversation."""
    text = read_text(_path(saved_id))
    try:
        return _title(json.loads(text)), text
    except json.JSONDecodeError:
        raise UserError(f"{_path(saved_id)} is not JSON: the file is damaged") from None


def rename(saved_id: str, title: str) -> str:
    """Give a saved conversation another title, which is returned as it is kept."""
    if not title.strip():
        raise UserError("the title is empty")
    _, text = read(saved_id)
    title = shortened(title)
    write(saved_id, title, text)
    return title


def delete(saved_id: str) -> None:
    """Delete a saved conversation; one that is not there is deleted already."""
    _path(saved_id).unlink(missing_ok=True)


def exists(saved_id: str) -> bool:
    """Whether there is such a file."""
    return _ID.fullmatch(saved_id) is not None and _path(saved_id).is_file()


def shortened(text: str) -> str:
    """One line of at most 60 characters."""
    line = " ".join(text.split())
    return line if len(line) <= _TITLE_LENGTH else line[: _TITLE_LENGTH - 1].rstrip() + "…"


def _folder() -> Path:
    return data_dir() / "conversations"


def _path(saved_id: str) -> Path:
    # The browser sends ids; one that is none must not become a path.
    if not _ID.fullmatch(saved_id):
        raise UserError("there is no such conversation")
    return _folder() / f"{saved_id}.json"


def _title(content: object) -> str:
    """The title kept in a file, or else its first message."""
    if not isinstance(content, dict):
        raise UserError("a saved conversation must be a JSON object")
    messages = content.get("messages") or [{}]
    return shortened(str(content.get("title") or messages[0].get("content") or "Untitled"))
