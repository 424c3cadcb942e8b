"""`Tokenizer`: encodes and decodes text and chat messages. `load_tokenizer` reads that of a model folder."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import tiktoken

from mlx_llama3.errors import UserError
from mlx_llama3.system.files import read_json, read_text
from mlx_llama3.tokenizer.chat_template import TemplateFormat
from mlx_llama3.tokenizer.detokenizer import Detokenizer
from mlx_llama3.tokenizer.llama3_format import ChatFormat, Llama3Format, Pieces, is_llama3_chat_template
from mlx_llama3.tokenizer.messages import PromptError, read_messages, read_tools
from mlx_llama3.tokenizer.vocabulary.added_tokens import matcher, name_of
from mlx_llama3.tokenizer.vocabulary.tokenizer_json import folder_config
from mlx_llama3.tokenizer.vocabulary.tokenizer_model import llama3_version
from mlx_llama3.tokenizer.vocabulary.vocabulary import Vocabulary

__all__ = ["PromptError", "Tokenizer", "load_tokenizer"]

# On longer texts, and on longer runs of space or non-space, tiktoken's regular expressions overflow their stack. Meta's
# tokenizer splits text at the same places (models/llama3/tokenizer.py), so the ids are the official ones.
_MAX_CHARACTERS = 400_000
_MAX_RUN = 25_000
_RUN = re.compile(r"\S+|\s+")

_END_NAMES = frozenset(["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>"])


class Tokenizer:
    """The tokenizer of one model.

    Args:
        vocabulary: its tokens.
        templates: its Jinja chat templates by name (`default`, `tool_use`). Without any, a Llama 3 vocabulary uses the
            official format, unless stop ids are declared and `<|eot_id|>` is not one of them (a base model).
        variables: template variables beside the messages (`bos_token`, ...).
        stop_ids: ids that end an answer, in addition to those of the vocabulary and the template.
        source: the folder's or file's name in errors.

    Attributes:
        vocab_size: one more than the highest id.
        bos_id: the id that begins a text, or None.
        add_bos: whether the model expects `bos_id` before every text. If so, prompts begin with exactly one.
        special_tokens: control tokens, name -> id.
        stop_ids: ids that end an answer.
        chat_templates: the Jinja templates by name; empty if the folder has none.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        templates: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        stop_ids: Iterable[int] = (),
        source: str = "tokenizer",
    ) -> None:
        templates = templates or {}
        declared = frozenset(vocabulary.eos_ids).union(stop_ids)
        self.vocabulary = vocabulary
        self.chat_templates = templates
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.add_bos = vocabulary.add_bos
        self.special_tokens = dict(vocabulary.special)
        self.stop_ids = declared | self._end_ids(templates)
        self._names = {n: name for name, n in vocabulary.special.items()}
        self._named = {**vocabulary.special, **vocabulary.added}
        self._added = matcher(vocabulary.added)
        self._encoding = tiktoken.Encoding(
            source, pat_str=vocabulary.pre_tokenizer.pattern, mergeable_ranks=vocabulary.ranks, special_tokens={}
        )
        self._source = source
        self._format = self._choose_format(templates, variables or {}, declared)

    def encode(self, text: str, *, bos: bool = False, allow_special: bool = False) -> list[int]:
        """The ids of `text`.

        Args:
            bos: prepend `bos_id`, if the model expects it (`add_bos`) and the ids do not begin with it already.
            allow_special: encode the names of control tokens in `text` as those tokens; otherwise as plain text.
        """
        pattern = self._added_and_special if allow_special else self._added
        parts = pattern.split(text) if pattern else [text]
        ids = list(
            chain.from_iterable([self._named[part]] if n % 2 else self._plain(part) for n, part in enumerate(parts))
        )
        return self._with_bos(ids) if bos else ids

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """The text of `ids`, with U+FFFD for invalid UTF-8. keep_special: include the names of control tokens.

        Ids past the end of the vocabulary, which padded models can generate, give no text.
        """
        to_bytes = self.token_bytes if keep_special else self._text_bytes
        return b"".join(map(to_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of an id: the name for a control token, empty past the end of the vocabulary."""
        return self.vocabulary.tokens[token] if 0 <= token < self.vocab_size else b""

    def detokenizer(self) -> Detokenizer:
        """A new incremental decoder for one answer."""
        return Detokenizer(self._text_bytes)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, add_generation_prompt: bool = True
    ) -> str:
        """The prompt of `encode_chat` as text, with the names of control tokens."""
        pieces = self._chat(messages, tools, add_generation_prompt)
        text = "".join(piece if isinstance(piece, str) else self._names[piece] for piece in pieces)
        bos = self._names.get(self.bos_id, "") if self.add_bos else ""
        return text if text.startswith(bos) else bos + text

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation, ready for the model to answer.

        Args:
            messages: `{"role", "content"}` each; roles system, user, assistant, tool (or ipython).
            tools: definitions of functions as JSON schemas, in the form of OpenAI's API or bare.
            add_generation_prompt: end with the header of the assistant's next message.

        Raises:
            PromptError: the messages cannot become a prompt, or a base model has no chat format.
        """
        return self._with_bos(self._ids(self._chat(messages, tools, add_generation_prompt)))

    def encode_after_reply(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None) -> list[int]:
        """The ids after the content of the assistant's last message, to extend a cache that ends there.

        They are that message's end-of-turn token, the messages after it, and the header of the next answer.

        Raises:
            PromptError: as for `encode_chat`; there is no assistant's message; the template does not write each answer
                once.
        """
        chat_format, checked = self._need_format(), read_messages(messages)
        reply = max((n for n, message in enumerate(checked) if message["role"] == "assistant"), default=None)
        if reply is None:
            raise PromptError("messages: there is no answer of the assistant's to go on from")
        return self._ids(chat_format.pieces_after(reply, checked, read_tools(tools)))

    def cuts_answers(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None) -> bool:
        """Whether `encode_chat` leaves a part of earlier answers out, as templates do with the reasoning of R1.

        If so, a cache that holds those answers is no beginning of the prompt. Raises `PromptError` as `encode_chat`.
        """
        return self._need_format().cuts_answers(read_messages(messages), read_tools(tools))

    def _chat(self, messages: Sequence[Mapping[str, Any]], tools: Any, generation_prompt: bool) -> Pieces:
        chat_format, checked = self._need_format(), read_messages(messages, need_user=generation_prompt)
        return chat_format.pieces(checked, read_tools(tools), generation_prompt)

    def _ids(self, pieces: Pieces) -> list[int]:
        return list(chain.from_iterable(self.encode(p) if isinstance(p, str) else [p] for p in pieces))

    def _with_bos(self, ids: list[int]) -> list[int]:
        return [self.bos_id, *ids] if self.add_bos and ids[:1] != [self.bos_id] else ids

    def _text_bytes(self, token: int) -> bytes:
        return b"" if token in self._names else self.token_bytes(token)

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in _parts(text):
            ids += self._encoding.encode_ordinary(part)
        if self.vocabulary.ids is not None:
            ids = [self.vocabulary.ids[rank] for rank in ids]
        if max(ids, default=0) < self.vocab_size:
            return ids
        # A byte without a token (in SmolLM those of six control characters) is unknown, or dropped, as in `tokenizers`.
        unknown = [] if self.vocabulary.unknown_id is None else [self.vocabulary.unknown_id]
        return list(chain.from_iterable([n] if n < self.vocab_size else unknown for n in ids))

    @cached_property
    def _added_and_special(self) -> re.Pattern[str] | None:
        return matcher(self._named)

    def _end_ids(self, templates: Mapping[str, str]) -> frozenset[int]:
        """The ids of control tokens whose names mean the end of an answer."""
        names = set(_END_NAMES)
        if any("<|im_end|>" in template for template in templates.values()):
            names.add("<|im_end|>")
        return frozenset(n for name, n in self.special_tokens.items() if name in names)

    def _choose_format(
        self, templates: Mapping[str, str], variables: Mapping[str, str], declared: frozenset[int]
    ) -> ChatFormat | None:
        official = is_llama3_chat_template(templates.get("default", ""))
        if templates and not (official and self.vocabulary.is_llama3):
            return TemplateFormat(templates, self.special_tokens, variables, self._source)
        ends_turns = not declared or self.special_tokens.get("<|eot_id|>") in declared
        return Llama3Format(self.special_tokens) if self.vocabulary.is_llama3 and ends_turns else None

    def _need_format(self) -> ChatFormat:
        if self._format is None:
            raise PromptError(
                f"{self._source}: a base model without a chat template; continue plain text with --raw, "
                "or use an instruct model"
            )
        return self._format


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a model folder, from its `tokenizer.json` or Meta's `tokenizer.model`.

    Stop ids are the union of those of the tokenizer, of `config.json` and of `generation_config.json`. A folder without
    a chat template, or with the one that this project's converter writes, uses the official Llama 3 format.

    Raises:
        UserError: the folder does not exist, has no tokenizer, or has one that is not supported (see `Vocabulary`).
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    settings = {
        name: _read_if_exists(folder / name) for name in ("config.json", "params.json", "generation_config.json")
    }
    config = folder_config(folder)
    return Tokenizer(
        _read_vocabulary(folder, settings["config.json"] or settings["params.json"]),
        templates=_templates(folder, config),
        variables={key: name for key, value in config.items() if key.endswith("_token") and (name := name_of(value))},
        stop_ids=chain.from_iterable(_eos_ids(config, folder / name) for name, config in settings.items()),
        source=str(folder),
    )


def _parts(text: str) -> Iterator[str]:
    """`text` in parts that do not exceed `_MAX_CHARACTERS`, with no run of space or non-space above `_MAX_RUN`."""
    if len(text) <= _MAX_RUN:
        yield text
        return
    for start in range(0, len(text), _MAX_CHARACTERS):
        part, begin = text[start : start + _MAX_CHARACTERS], 0
        for run in _RUN.finditer(part):
            for end in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                yield part[begin:end]
                begin = end
        yield part[begin:]


def _read_if_exists(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _read_vocabulary(folder: Path, config: Mapping[str, Any]) -> Vocabulary:
    if (folder / "tokenizer.json").exists():
        return Vocabulary.from_tokenizer_json(folder / "tokenizer.json")
    path = folder / "tokenizer.model"
    if not path.exists():
        raise UserError(f"{folder}: holds no tokenizer; expected tokenizer.json or tokenizer.model in it")
    vocabulary = Vocabulary.from_tokenizer_model(path, llama3_version(config) if config else "3.1")
    if config.get("vocab_size", -1) not in (-1, len(vocabulary.tokens)):
        raise UserError(
            f"{path}: {len(vocabulary.tokens)} tokens, but the model has {config['vocab_size']}; fetch it again"
        )
    return vocabulary


def _eos_ids(config: Mapping[str, Any], path: Path) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(n) is int for n in ids):
        raise UserError(f"{path}: eos_token_id is {value!r:.60}; it must be a token id or a list of them")
    return ids


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name, from the places that versions of transformers use; `.jinja` files take precedence."""
    written = config.get("chat_template") or _read_if_exists(folder / "chat_template.json").get("chat_template") or {}
    if isinstance(written, Mapping):
        pairs = list(written.items())
    elif isinstance(written, list) and all(isinstance(entry, Mapping) for entry in written):
        pairs = [(entry.get("name"), entry.get("template")) for entry in written]
    else:
        pairs = [("default", written)]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise UserError(f"{folder}: chat_template must be text, or a list of templates with name and template")
    files = {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    return dict(pairs) | {name: read_text(file) for name, file in files.items()}
