"""The official Llama 3 chat format, built from ids, and the same format as a Jinja template for other programs.

A prompt is a list of pieces: ids for control tokens, and strings to be encoded as plain text. So no text of a message
can become a control token.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mlx_llama3.tokenizer.messages import Message, PromptError
from mlx_llama3.tokenizer.vocabulary.tokenizer_model import Llama3Version

Pieces = list[int | str]

_TOOLS_BEFORE = (
    "Answer the user's question by making use of the following functions if needed.\n"
    "If none of the function can be used, please say so.\n"
    "Here is a list of functions in JSON format:\n"
)
_TOOLS_AFTER = "\nReturn function calls in JSON format."
_QUERY_TOOLS = ("brave_search", "wolfram_alpha", "photogen")  # built-in tools of 3.1, which have their own syntax
_CODE_TOOL = "code_interpreter"


class ChatFormat(Protocol):
    """Turns messages into a prompt. `messages` and `tools` come from `messages.read_messages` and `read_tools`."""

    def pieces(self, messages: Sequence[Message], tools: Sequence[Message] | None, generation_prompt: bool) -> Pieces:
        """The whole prompt; with `generation_prompt` it ends with the header of the assistant's next message."""
        ...

    def pieces_after(self, reply: int, messages: Sequence[Message], tools: Sequence[Message] | None) -> Pieces:
        """The prompt after the content of message number `reply`, the assistant's, with the next answer's header."""
        ...

    def cuts_answers(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> bool:
        """Whether the prompt lacks a part of an earlier answer, such as its reasoning."""
        ...


class Llama3Format:
    """Meta's format (`models/llama3/chat_format.py`, `llama3_1/prompt_format.md`).

    A message with tool calls ends in `<|eom_id|>` if the vocabulary has it (3.1 and later), because the model then
    expects the result. Tool definitions are a separate user message before the first message of the user.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special

    def pieces(self, messages: Sequence[Message], tools: Sequence[Message] | None, generation_prompt: bool) -> Pieces:
        pieces: Pieces = [self._special["<|begin_of_text|>"]]
        for message in _with_definitions(messages, tools):
            pieces += [*self._header(message["role"]), *self._body(message), self._end(message)]
        return pieces + self._header("assistant") if generation_prompt else pieces

    def pieces_after(self, reply: int, messages: Sequence[Message], tools: Sequence[Message] | None) -> Pieces:
        return [self._end(messages[reply]), *self.pieces(messages[reply + 1 :], None, True)[1:]]

    def cuts_answers(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> bool:
        return False

    def _header(self, role: str) -> Pieces:
        name = "ipython" if role == "tool" else role
        return [self._special["<|start_header_id|>"], name, self._special["<|end_header_id|>"], "\n\n"]

    def _body(self, message: Message) -> Pieces:
        functions = [call["function"] for call in message.get("tool_calls", ())]
        runs_code = bool(functions) and functions[0]["name"] == _CODE_TOOL and "<|python_tag|>" in self._special
        tag: Pieces = [self._special["<|python_tag|>"]] if runs_code else []
        return [*tag, message["content"], *map(_tool_call, functions)]

    def _end(self, message: Message) -> int:
        eot = self._special["<|eot_id|>"]
        return self._special.get("<|eom_id|>", eot) if message.get("tool_calls") else eot


def _with_definitions(messages: Sequence[Message], tools: Sequence[Message] | None) -> list[Message]:
    if not tools:
        return list(messages)
    first = next((n for n, message in enumerate(messages) if message["role"] == "user"), len(messages))
    schemas = "".join(json.dumps(tool, indent=4, ensure_ascii=False) + "\n" for tool in tools)
    definitions = {"role": "user", "content": _TOOLS_BEFORE + schemas + _TOOLS_AFTER}
    return [*messages[:first], definitions, *messages[first:]]


def _tool_call(function: Mapping[str, Any]) -> str:
    name, arguments = function["name"], function["arguments"]
    if name in _QUERY_TOOLS:
        return f'{name}.call(query="{_argument(function, "query")}")'
    if name == _CODE_TOOL:
        return str(_argument(function, "code"))
    return json.dumps({"type": "function", "name": name, "parameters": arguments})


def _argument(function: Mapping[str, Any], key: str) -> Any:
    if key not in function["arguments"]:
        raise PromptError(f"tool call {function['name']!r}: expected an argument {key!r}")
    return function["arguments"][key]


def llama3_chat_template(version: Llama3Version) -> str:
    """The format of `Llama3Format` as a Jinja template, for folders that other programs open.

    Other programs give different ids for a message that begins with line breaks: they merge them with the header's.
    """
    return (
        _TEMPLATE if version == "3.1" else _TEMPLATE.replace("<|eom_id|>", "<|eot_id|>").replace("<|python_tag|>", "")
    )


def is_llama3_chat_template(template: str) -> bool:
    """Whether a template is one of `llama3_chat_template`, so that `Llama3Format` can replace it."""
    return template in (llama3_chat_template("3.0"), llama3_chat_template("3.1"))


_TEMPLATE = """\
{{- bos_token }}
{%- set state = namespace(definitions=tools) %}
{%- for message in messages %}
    {%- if message.role == "user" and state.definitions %}
        {{- "<|start_header_id|>user<|end_header_id|>\\n\\n" }}
        {{- TOOLS_BEFORE }}
        {%- for tool in state.definitions %}
            {{- (tool if tool.function is defined else {"type": "function", "function": tool}) | tojson(indent=4) }}
            {{- "\\n" }}
        {%- endfor %}
        {{- TOOLS_AFTER + "<|eot_id|>" }}
        {%- set state.definitions = none %}
    {%- endif %}
    {{- "<|start_header_id|>" + ("ipython" if message.role == "tool" else message.role) + "<|end_header_id|>\\n\\n" }}
    {%- set calls = message.tool_calls or [] %}
    {%- if calls and calls[0].function.name == "code_interpreter" %}
        {{- "<|python_tag|>" }}
    {%- endif %}
    {{- message.content or "" }}
    {%- for call in calls %}
        {%- set function = call.function %}
        {%- if function.name in ["brave_search", "wolfram_alpha", "photogen"] %}
            {{- function.name + '.call(query="' + function.arguments.query + '")' }}
        {%- elif function.name == "code_interpreter" %}
            {{- function.arguments.code }}
        {%- else %}
            {%- set written = {"type": "function", "name": function.name, "parameters": function.arguments} %}
            {{- written | tojson(ensure_ascii=true) }}
        {%- endif %}
    {%- endfor %}
    {{- "<|eom_id|>" if calls else "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
""".replace("TOOLS_BEFORE", json.dumps(_TOOLS_BEFORE)).replace("TOOLS_AFTER", json.dumps(_TOOLS_AFTER))
