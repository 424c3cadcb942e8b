"""`Vocabulary`: the tokens of a model, read from one of the three file formats of tokenizers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_llama3.tokenizer.vocabulary import gguf as gguf_vocabulary, tokenizer_json
from mlx_llama3.tokenizer.vocabulary.pretokenizers import LLAMA3, PreTokenizer
from mlx_llama3.tokenizer.vocabulary.tokenizer_model import Llama3Version, read_ranks, special_tokens


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The data that a tokenizer needs to turn text into ids and back; immutable.

    Attributes:
        tokens: id -> bytes: the name for a special or added token, empty for an unused id.
        ranks: bytes -> rank, for tiktoken: the merge whose result has the lowest rank comes first. It contains all
            single bytes; a byte without a token has an id past the last one.
        special: control tokens, name -> id; text is encoded to them only with `allow_special`.
        added: tokens outside the merges that are ordinary text, such as `<think>`; they always match whole.
        pre_tokenizer: the rule that splits text before merges.
        ids: rank -> id; None if every rank is its id.
        bos_id: the token that begins a text.
        eos_ids: tokens that end an answer; the first is the EOS token.
        add_bos: whether the model expects `bos_id` before every text.
        unknown_id: the token for a byte without a token; None drops such a byte.
        merges: "left right" in the byte alphabet, in merge order, from a GGUF; None if they follow from the ranks.
    """

    tokens: Sequence[bytes] = field(repr=False)
    ranks: dict[bytes, int] = field(repr=False)
    special: Mapping[str, int] = field(repr=False)
    added: Mapping[str, int] = field(repr=False)
    pre_tokenizer: PreTokenizer = field(repr=False)
    ids: Sequence[int] | None = field(default=None, repr=False)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    unknown_id: int | None = None
    merges: Sequence[str] | None = field(default=None, repr=False)

    @property
    def is_llama3(self) -> bool:
        """Whether it has the control tokens of the official chat format."""
        names = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}
        return names <= self.special.keys()

    @classmethod
    def from_tokenizer_model(cls, path: Path, version: Llama3Version = "3.1") -> "Vocabulary":
        """Read Meta's `tokenizer.model` (tiktoken: base64 tokens and ranks).

        Args:
            version: selects the special tokens, see `tokenizer_model.llama3_version`.

        Raises:
            UserError: the file is a SentencePiece model (Llama 1 and 2), damaged or cut off.
        """
        ranks = read_ranks(path)
        special = special_tokens(version, len(ranks))
        return cls(
            tokens=[*ranks, *(name.encode() for name in special)],
            ranks=ranks,
            special=special,
            added={},
            pre_tokenizer=LLAMA3,
            bos_id=special["<|begin_of_text|>"],
            eos_ids=(special["<|eot_id|>"],),
            add_bos=True,
        )

    @classmethod
    def from_tokenizer_json(cls, path: Path) -> "Vocabulary":
        """Read Hugging Face's `tokenizer.json`, and `tokenizer_config.json` and `special_tokens_map.json` next to it.

        If a `tokenizer.model` in the same folder agrees, the ranks come from there, in a third of the time.

        Raises:
            UserError: a part that is not supported exactly: a model other than byte-level BPE, another pre-tokenizer, a
                normalizer, added tokens that strip white space, merges that do not match the vocabulary.
        """
        return cls(**tokenizer_json.read(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str = "GGUF") -> "Vocabulary":
        """Read the keys `tokenizer.ggml.*` of a GGUF; values may be lists, scalars, or arrays of NumPy or MLX.

        Args:
            source: the file's name in errors.

        Raises:
            UserError: the vocabulary is not byte-level BPE, or its pre-tokenizer is not supported.
        """
        return cls(**gguf_vocabulary.read(metadata, source))
