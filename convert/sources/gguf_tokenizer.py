"""The tokenizer and the chat template in the metadata of a GGUF."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.gguf.metadata import LLAMA3_ENDS, TEMPLATE
from convert.gguf.reader import GGUFError
from convert.sources.tokenizer_files import write_tokenizer
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.tokenizer.vocabulary.vocabulary import Vocabulary

_TOKENS, _NAMED = "tokenizer.ggml.tokens", f"{TEMPLATE}."
_LISTS = {_TOKENS: str, "tokenizer.ggml.merges": str, "tokenizer.ggml.token_type": int}
_TEXTS = ("tokenizer.ggml.model", "tokenizer.ggml.pre", TEMPLATE)
_IDS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("bos", "eos", "eot", "eom"))


@dataclass(frozen=True)
class GGUFTokenizer:
    """The tokenizer of a GGUF; `vocabulary` is None if the file has none. `chat_templates` are Jinja texts by name."""

    vocabulary: Vocabulary | None
    chat_templates: Mapping[str, str]
    max_seq_len: int

    def generation_config(self) -> dict[str, Any]:
        """`bos_token_id` and `eos_token_id` for generation_config.json."""
        if self.vocabulary is None:
            return {}
        special = self.vocabulary.special
        named = [special[name] for name in LLAMA3_ENDS if self.vocabulary.is_llama3 and name in special]
        ends = list(dict.fromkeys([*self.vocabulary.eos_ids, *named]))
        ids = {"bos_token_id": self.vocabulary.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends}
        return {key: value for key, value in ids.items() if value not in (None, [])}

    def write(self, target: Path) -> list[str]:
        """Write the tokenizer's files into the folder `target` and return their names."""
        if self.vocabulary is None:
            return []
        return write_tokenizer(
            self.vocabulary, target, chat_template=self.chat_templates, model_max_length=self.max_seq_len
        )


def read_tokenizer(metadata: Mapping[str, Any], args: ModelArgs, source: str) -> GGUFTokenizer:
    """Read the keys `tokenizer.*`; `source` names the file in messages.

    Raises:
        UserError: a value of the wrong type, an id beyond the tokens, more tokens than rows of the embedding, or a
            vocabulary that is not supported (`Vocabulary.from_gguf`).
    """
    if _TOKENS not in metadata:
        return GGUFTokenizer(None, {}, args.max_seq_len)
    _check_types(metadata, source)
    for key in _IDS:
        if not 0 <= metadata.get(key, 0) < len(metadata[_TOKENS]):
            raise GGUFError(f"{source}: {key} is {metadata[key]}, but there are {len(metadata[_TOKENS])} tokens")
    if len(metadata[_TOKENS]) > args.vocab_size:
        raise GGUFError(
            f"{source}: {_TOKENS} has {len(metadata[_TOKENS])} entries, but the embedding has {args.vocab_size} rows"
        )
    templates = {key.removeprefix(_NAMED): text for key, text in metadata.items() if key.startswith(_NAMED)}
    templates |= {"default": metadata[TEMPLATE]} if TEMPLATE in metadata else {}
    return GGUFTokenizer(Vocabulary.from_gguf(metadata, source), templates, args.max_seq_len)


def _check_types(metadata: Mapping[str, Any], source: str) -> None:
    for key, kind in _LISTS.items():
        value = metadata.get(key, [])
        # All elements of a GGUF array have one type.
        if not isinstance(value, list) or (value and type(value[0]) is not kind):
            raise GGUFError(f"{source}: {key} must be an array of {kind.__name__}; the file is damaged")
    expected = dict.fromkeys(_TEXTS, str) | dict.fromkeys(_IDS, int) | {"tokenizer.ggml.add_bos_token": bool}
    expected |= {key: str for key in metadata if key.startswith(_NAMED)}
    for key, kind in expected.items():
        if key in metadata and type(metadata[key]) is not kind:
            raise GGUFError(f"{source}: {key} is {metadata[key]!r:.60}, expected {kind.__name__}; the file is damaged")
