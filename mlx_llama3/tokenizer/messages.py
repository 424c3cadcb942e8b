"""Validation and normalization of chat messages and tool definitions, before a chat format writes them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_llama3.errors import UserError

ROLES = ("system", "user", "assistant", "tool", "ipython")
Message = dict[str, Any]


class PromptError(UserError):
    """The messages cannot become a prompt: an unknown role, an empty message, a template that rejects them, ..."""


def read_messages(messages: Any, *, need_user: bool = True) -> list[Message]:
    """Copies of `messages` with content as text and the arguments of tool calls as objects.

    Content that is a list of `{"type": "text", "text": ...}` is joined. Messages of the assistant and of tools may be
    empty, those of the user may not. An empty system message is left out, because clients without a system prompt send
    one. Other keys stay, because templates may read them.

    Args:
        messages: a list of `{"role", "content"}`; an assistant's may have `tool_calls` (in the form of OpenAI's API).
        need_user: whether at least one message must be the user's.

    Raises:
        PromptError: one line with the number of the message, counted from 1.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise PromptError(
            f"messages: expected a list of objects with role and content, found {type(messages).__name__}"
        )
    normalized = [_message(message, f"message {count}") for count, message in enumerate(messages, start=1)]
    normalized = [m for m in normalized if m["role"] != "system" or m["content"].strip()]
    if need_user and not any(message["role"] == "user" for message in normalized):
        raise PromptError("messages: there is none from the user; expected at least one")
    return normalized


def read_tools(tools: Any) -> list[Message] | None:
    """Tool definitions as `{"type": "function", "function": {"name", ...}}`; None if there are none.

    Raises `PromptError` for definitions that are not JSON schemas of functions with names.
    """
    if tools is None or tools == []:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise PromptError("tools: expected a list of JSON schemas of functions")
    wrapped = [dict(tool) if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    for count, tool in enumerate(wrapped, start=1):
        _check_function_name(tool["function"], f"tool {count}")
    return wrapped


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise PromptError(f"{where}: expected an object with role and content, found {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise PromptError(f"{where}: unknown role {role!r}; expected one of {', '.join(ROLES)}")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Sequence):
        raise PromptError(f"{where}: expected a list as tool_calls, found {type(calls).__name__}")
    if calls and role != "assistant":
        raise PromptError(f"{where}: only an assistant can have tool_calls, not {role!r}")
    content = _text(message.get("content"), f"{where} ({role})", optional=bool(calls))
    if role == "user" and not content.strip():
        raise PromptError(f"{where} ({role}) is empty; write something, or leave it out")
    normalized = {**message, "content": content}
    if calls:
        normalized["tool_calls"] = [_tool_call(call, where) for call in calls]
    return normalized


def _text(content: Any, where: str, *, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, Sequence):
        raise PromptError(f"{where}: expected text as content, found {type(content).__name__}")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise PromptError(f"{where}: content of type {kind!r} is not supported; this is a text model")
        parts.append(part["text"])
    return "".join(parts)


def _tool_call(call: Any, where: str) -> Message:
    """`call` as `{"type": "function", "function": {"name", "arguments": object}}`, with its other keys."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    _check_function_name(function, f"{where}: tool call")
    arguments = function.get("arguments", {})
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: the arguments of tool call {function['name']!r} are not JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise PromptError(f"{where}: the arguments of tool call {function['name']!r} are not an object")
    others = {key: value for key, value in call.items() if key not in ("name", "arguments", "function")}
    return {"type": "function", **others, "function": {**function, "arguments": arguments}}


def _check_function_name(function: Any, where: str) -> None:
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(f"{where}: expected a function with a name")
