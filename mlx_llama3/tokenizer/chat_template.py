"""Jinja chat templates of model folders, run in a sandbox and protected from control tokens in messages.

The environment is that of transformers (`utils/chat_template_utils.py`), so templates render to the same text.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from mlx_llama3.tokenizer.llama3_format import Pieces
from mlx_llama3.tokenizer.messages import Message, PromptError
from mlx_llama3.tokenizer.template_marks import Marks
from mlx_llama3.tokenizer.vocabulary.added_tokens import matcher

if TYPE_CHECKING:
    from jinja2 import Template

    from mlx_llama3.tokenizer.template_bounds import BoundedEnvironment


class TemplateFormat:
    """A `ChatFormat` that renders a folder's chat templates.

    Args:
        templates: name -> Jinja source; `default`, and optionally `tool_use` for prompts with tools.
        special: control tokens, name -> id.
        variables: template variables beside the messages: `bos_token`, `eos_token`, ...
        source: the folder's name in errors.
    """

    def __init__(
        self, templates: Mapping[str, str], special: Mapping[str, int], variables: Mapping[str, str], source: str
    ) -> None:
        self._templates = templates
        self._special = special
        self._variables = variables
        self._source = source
        self._pattern = matcher(special)

    def pieces(self, messages: Sequence[Message], tools: Sequence[Message] | None, generation_prompt: bool) -> Pieces:
        """As in `ChatFormat`. Raises `PromptError` if the template fails, or leaves out a message or the tools."""
        template = self._choose(tools)
        placeholders = _Placeholders(self._pattern, template, messages, tools)
        messages = self._complete(template, placeholders, messages, tools)
        return self._split(self._render(template, placeholders, messages, tools, generation_prompt), placeholders)

    def pieces_after(self, reply: int, messages: Sequence[Message], tools: Sequence[Message] | None) -> Pieces:
        """As in `ChatFormat`: renders a marker in place of the reply, and returns what follows the marker.

        Raises `PromptError` if the template fails, or does not write the reply exactly once.
        """
        template = self._choose(tools)
        placeholders = _Placeholders(self._pattern, template, messages, tools)
        messages = self._complete(template, placeholders, messages, tools)
        marker = placeholders.unused()
        # The reply's ids, with its tool calls, are known already, so the template must not write the calls again.
        content = marker if isinstance(messages[reply]["content"], str) else _in_parts(marker)
        marked = {key: value for key, value in messages[reply].items() if key != "tool_calls"} | {"content": content}
        messages = [*messages[:reply], marked, *messages[reply + 1 :]]
        _, *after = self._render(template, placeholders, messages, tools, True).split(marker)
        if len(after) != 1:
            raise PromptError(
                f"{self._source}: the chat template does not write each answer once, so none can follow it"
            )
        return self._split(after[0], placeholders)

    def cuts_answers(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> bool:
        """As in `ChatFormat`: whether the marked beginning of an answer is missing. Raises as `pieces` does."""
        template = self._choose(tools)
        placeholders = _Placeholders(self._pattern, template, messages, tools)
        marks = Marks(self._complete(template, placeholders, messages, tools), tools, placeholders.unused)
        return marks.cut_answer(self._render(template, placeholders, marks.messages, marks.tools, True))

    def _complete(
        self,
        template: str,
        placeholders: "_Placeholders",
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
    ) -> list[Message]:
        """`messages` with contents as the template writes them in full: as text, else as lists of parts.

        Raises `PromptError` if a message, or a tool, is left out either way.
        """
        written, fault = list(messages), None
        try:
            missing = self._left_out(template, placeholders, written, tools)
        except PromptError as error:
            missing, fault = list(range(len(written))), error
        if missing:
            written = [_with_parts(m) if n in missing else m for n, m in enumerate(written)]
            try:
                missing = self._left_out(template, placeholders, written, tools)
            except PromptError as error:
                raise fault or self._leaves_out(messages[missing[0]]) from error
        if missing:
            raise self._leaves_out(messages[missing[0]])
        return written

    def _leaves_out(self, message: Message) -> PromptError:
        return PromptError(
            f"{self._source}: the chat template leaves out the {message['role']} message {message['content']!r:.40}; "
            "use another model, or say it in another role"
        )

    def _left_out(
        self,
        template: str,
        placeholders: "_Placeholders",
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
    ) -> list[int]:
        marks = Marks(messages, tools, placeholders.unused)
        rendered = self._render(template, placeholders, marks.messages, marks.tools, True)
        if marks.tools_left_out(rendered):
            raise PromptError(
                f"{self._source}: the chat template leaves tools out; use a model that was trained with tools, "
                "or describe them in a message"
            )
        return marks.left_out(rendered)

    def _choose(self, tools: Sequence[Message] | None) -> str:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise PromptError(f"{self._source}: there is no default chat template, only {', '.join(self._templates)}")
        return self._templates[name]

    def _render(
        self,
        template: str,
        placeholders: "_Placeholders",
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        generation_prompt: bool,
    ) -> str:
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            _environment().begin()
            return _compile(template).render(
                messages=placeholders.substitute(messages),
                tools=placeholders.substitute(tools),
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except TemplateSyntaxError as error:
            fault = f"cannot be read, line {error.lineno}: {' '.join(str(error.message).split())}"
        except (RecursionError, MemoryError, SyntaxError):
            fault = "is nested too deeply, or calls itself without end"
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            fault = f"does not take these messages: {' '.join(str(error).split())}"
        raise PromptError(f"{self._source}: the chat template {fault}")

    def _split(self, rendered: str, placeholders: "_Placeholders") -> Pieces:
        parts = self._pattern.split(rendered) if self._pattern else [rendered]
        return [self._special[part] if n % 2 else placeholders.restore(part) for n, part in enumerate(parts)]


def _with_parts(message: Message) -> Message:
    content = message["content"]
    return message | {"content": _in_parts(content)} if content and isinstance(content, str) else message


def _in_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


class _Placeholders:
    """Replaces the control tokens in messages by unused private-use characters before a template is rendered.

    A template can join, trim and split such a character like any other. All control tokens in the rendered text are
    then the template's own.
    """

    def __init__(self, pattern: Any, *inputs: Any) -> None:
        self._pattern = pattern
        self._inputs = json.dumps(inputs, ensure_ascii=False, default=str)
        self._characters = map(chr, range(0xF0000, 0xFFFFE))
        self._by_name: dict[str, str] = {}  # control token -> its placeholder
        self._names: dict[int, str] = {}  # code point of a placeholder -> control token

    def unused(self) -> str:
        """A new character that the inputs do not contain."""
        return next(character for character in self._characters if character not in self._inputs)

    def substitute(self, value: Any) -> Any:
        """`value` with placeholders in all of its strings."""
        if isinstance(value, str):
            return self._pattern.sub(self._placeholder, value) if self._pattern else value
        if isinstance(value, Mapping):
            return {self.substitute(key): self.substitute(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.substitute(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        """`text` with control tokens in place of their placeholders."""
        return text.translate(self._names)

    def _placeholder(self, match: Any) -> str:
        name = match.group()
        if name not in self._by_name:
            self._by_name[name] = self.unused()
            self._names[ord(self._by_name[name])] = name
        return self._by_name[name]


@cache
def _compile(template: str) -> "Template":
    return _environment().from_string(template)


@cache
def _environment() -> "BoundedEnvironment":
    from jinja2 import TemplateError, nodes  # imported here because only folders with their own template need it
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    from mlx_llama3.tokenizer.template_bounds import BoundedEnvironment

    class Generation(Extension):
        """`{% generation %}`, which marks an assistant's text for training; here only its body is rendered."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` without the HTML escapes of Jinja's own (for `<`, `>`, `&` and `'`)."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
