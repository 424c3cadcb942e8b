"""Saved conversations: a JSON file with the system prompt, the messages and the settings."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from mlx_llama3.errors import UserError
from mlx_llama3.generation.sampling import Sampling
from mlx_llama3.system.files import parse_json, read_text, replacing

FORMAT = "mlx-llama3 conversation"
VERSION = 1
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class SavedConversation(NamedTuple):
    """The content of a file; `turns` are pairs of the user's message and its reply."""

    system: str | None
    turns: list[tuple[str, str]]
    settings: dict[str, Any]


def dump(system: str | None, messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any]) -> str:
    """JSON text of a conversation; `messages` alternate between user and assistant."""
    content = {"format": FORMAT, "version": VERSION, "system": system, "messages": messages, "settings": settings}
    # Lone surrogates, from a terminal that is not UTF-8 or from escapes in JSON, cannot be encoded as UTF-8.
    return _LONE_SURROGATE.sub("\ufffd", json.dumps(content, ensure_ascii=False, indent=2)) + "\n"


def load(text: str, source: str) -> SavedConversation:
    """Parse the text that `dump` wrote. Raises `UserError`, one line with `source` and the fault."""
    content = parse_json(text, source)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f'{source} is not a saved conversation: it has no "format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise UserError(f"{source} has version {content.get('version')!r}; this program reads version {VERSION}")
    system = content.get("system")
    if system is not None and not isinstance(system, str):
        raise UserError(f"{source}: system is {type(system).__name__}; it must be text or null")
    turns = _turns(content.get("messages"), source)
    return SavedConversation(system, turns, read_settings(content.get("settings", {}), source))


def _turns(messages: Any, source: str) -> list[tuple[str, str]]:
    if not isinstance(messages, list):
        raise UserError(f"{source}: messages must be a list of objects with role and content")
    for number, message in enumerate(messages, 1):
        role = "user" if number % 2 else "assistant"
        if not isinstance(message, dict) or message.get("role") != role:
            raise UserError(f"{source}: message {number} must have role {role!r}; user and assistant take turns")
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise UserError(f"{source}: message {number} has no text in content")
    if len(messages) % 2:
        raise UserError(f"{source}: message {len(messages)} of the user has no reply")
    texts = [message["content"] for message in messages]
    return list(zip(texts[::2], texts[1::2], strict=True))


def read_settings(settings: Any, source: str) -> dict[str, Any]:
    """Validate `settings`, options of `generate`. Raises `UserError`, as `generate` would for their values."""
    if not isinstance(settings, dict):
        raise UserError(f"{source}: settings is {type(settings).__name__}; it must be an object")
    sampling = {field.name for field in fields(Sampling)}
    unknown = settings.keys() - sampling - {"max_tokens", "stop"}
    if unknown:
        raise UserError(f"{source}: there is no setting {min(unknown)!r}")
    if "logit_bias" in settings:
        settings["logit_bias"] = _with_ids(settings["logit_bias"], source)
    stop, max_tokens = settings.get("stop", []), settings.get("max_tokens", 1)
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise UserError(f"{source}: stop must be a list of texts")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):  # a bool is an int too
        raise UserError(f"{source}: max_tokens is {max_tokens!r}; it must be a whole number of at least 1, or null")
    try:
        Sampling(**{name: value for name, value in settings.items() if name in sampling})
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    return settings


def _with_ids(bias: Any, source: str) -> dict[int, Any]:
    """`logit_bias` with its keys as ids, since JSON keys are strings."""
    if not isinstance(bias, dict) or not all(token.isdecimal() for token in bias):
        raise UserError(f"{source}: logit_bias must be an object of token ids and numbers")
    return {int(token): value for token, value in bias.items()}


def write_file(path: Path, text: str) -> None:
    """Write the file atomically. Raises `UserError` rather than overwrite a file that is not a saved conversation."""
    try:
        if path.exists():
            _check_saved(path)
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot save the conversation: {error.strerror}") from error


def _check_saved(path: Path) -> None:
    try:
        load(read_text(path), str(path))
    except UserError as error:
        raise UserError(f"{path} exists and is not a saved conversation; choose another name") from error
