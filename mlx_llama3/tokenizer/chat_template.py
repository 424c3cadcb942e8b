"""Chat templates in Jinja, as model folders bring them: run in a sandbox, and safe from control tokens in messages.

The environment is that of transformers (`utils/chat_template_utils.py`), so a template gives the same text here.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from mlx_llama3.tokenizer.llama3_format import Pieces
from mlx_llama3.tokenizer.messages import Message, PromptError
from mlx_llama3.tokenizer.vocabulary.added_tokens import matcher

if TYPE_CHECKING:
    from jinja2 import Environment, Template


class TemplateFormat:
    """A `ChatFormat` that a folder's templates write.

    Args:
        templates: name -> Jinja source; `default`, and `tool_use` if tools have one of their own.
        special: control tokens, name -> id.
        variables: what templates may read beside the messages: `bos_token`, `eos_token`, ...
        source: the folder, to be named in errors.
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
        template = self._choose(tools)
        cover = _Cover(self._pattern, template, messages, tools)
        return self._split(self._render(template, cover, messages, tools, generation_prompt), cover)

    def pieces_after(self, reply: int, messages: Sequence[Message], tools: Sequence[Message] | None) -> Pieces:
        template = self._choose(tools)
        cover = _Cover(self._pattern, template, messages, tools)
        mark = cover.unused()
        # Its ids are known already, so its calls must not be written a second time.
        marked = {key: value for key, value in messages[reply].items() if key != "tool_calls"} | {"content": mark}
        messages = [*messages[:reply], marked, *messages[reply + 1 :]]
        _, *after = self._render(template, cover, messages, tools, True).split(mark)
        if len(after) != 1:
            raise PromptError(
                f"{self._source}: the chat template does not write each answer once, so none can follow it"
            )
        return self._split(after[0], cover)

    def _choose(self, tools: Sequence[Message] | None) -> str:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise PromptError(f"{self._source}: there is no default chat template, only {', '.join(self._templates)}")
        return self._templates[name]

    def _render(
        self,
        template: str,
        cover: "_Cover",
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        generation_prompt: bool,
    ) -> str:
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            return _compiled(template).render(
                messages=cover(messages),
                tools=cover(tools),
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except TemplateSyntaxError as error:
            fault = f"cannot be read, line {error.lineno}: {' '.join(str(error.message).split())}"
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            fault = f"does not take these messages: {' '.join(str(error).split())}"
        raise PromptError(f"{self._source}: the chat template {fault}")

    def _split(self, rendered: str, cover: "_Cover") -> Pieces:
        parts = self._pattern.split(rendered) if self._pattern else [rendered]
        return [self._special[part] if n % 2 else cover.undo(part) for n, part in enumerate(parts)]


class _Cover:
    """Stands private-use characters, each unused elsewhere, in place of the control tokens that messages contain.

    A template can join, trim and split such a character like any other; the control tokens in the rendered text are
    then those that the template wrote itself.
    """

    def __init__(self, pattern: Any, *seen: Any) -> None:
        self._pattern = pattern
        self._seen = json.dumps(seen, ensure_ascii=False, default=str)
        self._characters = map(chr, range(0xF0000, 0xFFFFE))
        self._stands_for: dict[str, str] = {}
        self._names: dict[int, str] = {}

    def unused(self) -> str:
        return next(character for character in self._characters if character not in self._seen)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(self._stand_in, value) if self._pattern else value
        if isinstance(value, Mapping):
            return {self(key): self(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self(item) for item in value]
        return value

    def undo(self, text: str) -> str:
        return text.translate(self._names)

    def _stand_in(self, found: Any) -> str:
        name = found.group()
        if name not in self._stands_for:
            self._stands_for[name] = self.unused()
            self._names[ord(self._stands_for[name])] = name
        return self._stands_for[name]


@cache
def _compiled(template: str) -> "Template":
    return _environment().from_string(template)


@cache
def _environment() -> "Environment":
    from jinja2 import TemplateError, nodes  # only folders with a template of their own need it
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, which marks an assistant's words for training: its body is all that counts here."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
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
    """Jinja's own filter escapes `<`, `>`, `&` and `'` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
