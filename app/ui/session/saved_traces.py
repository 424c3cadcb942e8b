"""Saved traces: safetensors files in the user's data folder. File names are random ids, never a trace's name."""

import json
import re
import secrets
from pathlib import Path

from safetensors import SafetensorError, safe_open

from app.ui.session.saved_conversations import data_dir, shortened
from mlx_llama3.errors import UserError
from mlx_llama3.system.memory import check_memory
from mlx_llama3.trace.store import FORMAT, Trace, load_trace

_ID = re.compile(r"[0-9a-f]{16}")
_NAME = "name"  # the key of the user's name for a trace in its settings


def listed() -> list[tuple[str, str]]:
    """(name, id) of all saved traces, newest first. Other files are ignored."""
    entries = []
    for path in _folder().glob("*.safetensors"):
        if _ID.fullmatch(path.stem):
            try:
                entries.append((path.stat().st_mtime, _name(path), path.stem))
            except (OSError, SafetensorError, UserError):
                continue  # a damaged file must not hide the others; opening it raises the error
    return [(name, trace_id) for _, name, trace_id in sorted(entries, reverse=True)]


def save(trace: Trace, name: str) -> str:
    """Save a trace under a name; returns its id. Raises `UserError` if it is empty or cannot be written."""
    if not len(trace.tokens):
        raise UserError("there is no trace yet: ask something first")
    named = Trace(trace.model, trace.tokens, trace.pieces, trace.norms, trace.extra, dict(trace.settings))
    named.settings[_NAME] = shortened(name) or shortened("".join(trace.pieces))
    trace_id = secrets.token_hex(8)
    _folder().mkdir(parents=True, exist_ok=True)
    named.save(path(trace_id))
    return trace_id


def take_in(source: Path, name: str) -> str:
    """Save a copy of any trace file, such as one that `mlx-llama3 trace` wrote; returns its id."""
    check_memory(source.stat().st_size, name, "choose a smaller trace")
    return save(load_trace(source), name)


def open_trace(trace_id: str) -> Trace:
    """Read a saved trace. Raises `UserError` if it is missing or damaged."""
    check_memory(path(trace_id).stat().st_size if path(trace_id).is_file() else 0, "the trace", "close other programs")
    return load_trace(path(trace_id))


def delete(trace_id: str) -> None:
    """Delete a saved trace, if it exists."""
    path(trace_id).unlink(missing_ok=True)


def path(trace_id: str) -> Path:
    """The file of a trace. Raises `UserError` if `trace_id`, which comes from the browser, is not an id."""
    if not isinstance(trace_id, str) or not _ID.fullmatch(trace_id):
        raise UserError("there is no such trace")
    return _folder() / f"{trace_id}.safetensors"


def _folder() -> Path:
    return data_dir() / "traces"


def _name(file: Path) -> str:
    with safe_open(file, "numpy") as tensors:
        metadata = tensors.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise UserError(f"{file}: not a trace")
    try:
        settings = json.loads(metadata["settings"])
        name = settings[_NAME] if isinstance(settings, dict) else ""
    except (KeyError, json.JSONDecodeError):
        name = ""
    return f"{shortened(str(name)) or 'Untitled'} ({shortened(metadata.get('model', ''))})"
