"""Reads the lines of `generate --batch FILE`: each is a prompt, or an object with a prompt and its own options."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from app.options.options import SETTINGS
from app.options.stdin import read_stdin
from mlx_llama3.conversation.saved import read_settings
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import parse_json, read_text
from mlx_llama3.tokenizer.messages import PromptError, read_messages

KEYS = ("id", "prompt", "messages", "system")


class BatchLine(NamedTuple):
    """One prompt: its line number (from 1), its own id if any, its chat, and its arguments for `generate`."""

    number: int
    id: Any
    messages: list[dict[str, Any]]
    settings: dict[str, Any]


def read_lines(path: Path, defaults: Mapping[str, Any], system: str | None) -> list[BatchLine]:
    """All lines of a file (`-`: standard input) that are not blank.

    A line is JSON: text, the user's message; or an object with `prompt` or `messages`, and if wanted `id`, `system` and
    options such as `max_tokens`, which come before `defaults`. `system` is for lines without one.
    Raises `UserError` that names the file and the line.
    """
    name = "standard input" if str(path) == "-" else str(path)
    texts = list(read_stdin()) if str(path) == "-" else read_text(path).split("\n")
    lines = [
        _line(number, text, f"{name}, line {number}", defaults, system)
        for number, text in enumerate(texts, start=1)
        if text.strip()
    ]
    if not lines:
        raise UserError(f"{name} holds no prompts; expected one a line, as JSON")
    return lines


def _line(number: int, text: str, where: str, defaults: Mapping[str, Any], system: str | None) -> BatchLine:
    content = parse_json(text, where)
    if isinstance(content, str):
        content = {"prompt": content}
    if not isinstance(content, dict) or ("prompt" in content) == ("messages" in content):
        raise UserError(f'{where}: expected a text, or an object with either "prompt" or "messages"')
    if unknown := content.keys() - set(KEYS) - SETTINGS.keys():
        raise UserError(f"{where}: there is no key {min(unknown)!r}; expected {', '.join((*KEYS, *SETTINGS))}")
    own = {key: value for key, value in content.items() if key in SETTINGS}
    if isinstance(own.get("stop"), str):
        own["stop"] = [own["stop"]]
    settings = dict(defaults) | {key: value for key, value in read_settings(own, where).items() if value is not None}
    return BatchLine(number, content.get("id"), _messages(content, where, system), settings)


def _messages(content: Mapping[str, Any], where: str, system: str | None) -> list[dict[str, Any]]:
    try:
        if "messages" not in content:
            said = content.get("system", system)
            head = [] if said is None else [{"role": "system", "content": said}]
            return read_messages([*head, {"role": "user", "content": content["prompt"]}])
        if "system" in content:
            raise UserError(f'{where}: "system" does not go with "messages", which say everything themselves')
        messages = read_messages(content["messages"])
    except PromptError as error:
        raise UserError(f"{where}: {error}") from error
    if messages[-1]["role"] == "assistant":
        raise UserError(f"{where}: the last message is the assistant's, and is not continued; end with the user's")
    return messages
