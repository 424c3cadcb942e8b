"""Marks at both ends of every message and in every tool's name, which show what a chat template leaves out.

A template may trim, split and escape text, so its words cannot be searched for. A mark is a character of no use to it.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from mlx_llama3.tokenizer.messages import Message


class Marks:
    """One mark for each message with content, and one for each tool; `unused` gives a new character each time.

    The marked copies are `messages` and `tools`.
    """

    def __init__(self, messages: Sequence[Message], tools: Sequence[Message] | None, unused: Callable[[], str]) -> None:
        self._originals = messages
        self._marks = [unused() if message["content"] else "" for message in messages]
        self._tool_marks = [unused() for _ in tools or ()]
        self.messages = [_marked(m, mark) if mark else m for m, mark in zip(messages, self._marks, strict=True)]
        self.tools = tools and [_named(t, mark) for t, mark in zip(tools, self._tool_marks, strict=True)]

    def left_out(self, rendered: str) -> list[int]:
        """The numbers of the messages, from 0, whose content is not in `rendered`, the text of the marked copies.

        A template may cut the beginning of an answer, which is its reasoning, and write tool calls in place of it.
        """
        return [
            number
            for number, (message, mark) in enumerate(zip(self._originals, self._marks, strict=True))
            if mark
            and not message.get("tool_calls")
            and _count(rendered, mark) < (1 if message["role"] == "assistant" else 2)
        ]

    def cut_answer(self, rendered: str) -> bool:
        """Whether `rendered` lacks the beginning of an answer, which is its reasoning."""
        return any(
            mark and message["role"] == "assistant" and _count(rendered, mark) < 2
            for message, mark in zip(self._originals, self._marks, strict=True)
        )

    def tools_left_out(self, rendered: str) -> bool:
        """Whether `rendered` lacks the name of a tool."""
        return any(not _count(rendered, mark) for mark in self._tool_marks)


def _marked(message: Message, mark: str) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": mark + content + mark}
    return message | {"content": [part | {"text": mark + part["text"] + mark} for part in content]}


def _named(tool: Message, mark: str) -> Message:
    function: dict[str, Any] = tool["function"]
    return tool | {"function": function | {"name": function["name"] + mark}}


def _count(rendered: str, mark: str) -> int:
    """How often the mark is there, as itself or as an escape of JSON."""
    return rendered.count(mark) + rendered.count(json.dumps(mark)[1:-1])
