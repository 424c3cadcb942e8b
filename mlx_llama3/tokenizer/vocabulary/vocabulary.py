"""The tokens of a model: `Vocabulary`, read from one of the three files in which tokenizers travel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_llama3.tokenizer.vocabulary import gguf as gguf_vocabulary, tokenizer_json
from mlx_llama3.tokenizer.vocabulary.pretokenizers import LLAMA3, PreTokenizer
from mlx_llama3.tokenizer.vocabulary.tokenizer_model import Llama3Version, read_ranks, special_tokens


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Everything that turns text into ids and back; not to be changed once made.

    Attributes:
        tokens: id -> its bytes: the written name of a special or added token, nothing for an id that is not used.
        ranks: bytes -> rank, for tiktoken: of two possible merges, the one that makes the lower rank comes first. All
            single bytes are there; one that is no token stands for an id past the last.
        special: control tokens, name -> id; never made from text unless asked for.
        added: tokens outside the merges that are ordinary text, such as `<think>`; always found whole.
        pre_tokenizer: the rule that cuts text into pieces.
        ids: rank -> id where ids are not in merge order; None where a rank is its id.
        bos_id: the token that begins a text.
        eos_ids: those that end an answer; the first is what others call the EOS token.
        add_bos: whether the model expects `bos_id` before every text.
        unknown_id: what stands for a byte that is no token; None: such a byte is dropped.
        merges: "left right" in the byte alphabet, in merge order, as a GGUF has them; None: they follow from the ranks.
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
        """Whether the official chat format can be written with it."""
        names = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}
        return names <= self.special.keys()

    @classmethod
    def from_tokenizer_model(cls, path: Path, version: Llama3Version = "3.1") -> "Vocabulary":
        """Read Meta's `tokenizer.model` (tiktoken: base64 tokens and ranks).

        Args:
            version: which special tokens follow the ranks, see `tiktoken_file.llama3_version`.

        Raises:
            UserError: a SentencePiece model (Llama 1 and 2); a file that is damaged or cut off.
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
        """Read Hugging Face's `tokenizer.json`, with `tokenizer_config.json` and `special_tokens_map.json` beside it.

        A `tokenizer.model` beside it that agrees gives the ranks, in a third of the time.

        Raises:
            UserError: each part whose effect is not known to be exact: a model that is not byte-level BPE, another
                pre-tokenizer, a normalizer, added tokens that eat white space, merges that do not fit the vocabulary.
        """
        return cls(**tokenizer_json.read(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str = "GGUF") -> "Vocabulary":
        """Read the keys `tokenizer.ggml.*` of a GGUF; values may be lists, scalars, or arrays of NumPy or MLX.

        Args:
            source: the file, to be named in errors.

        Raises:
            UserError: a vocabulary that is not byte-level BPE; a pre-tokenizer that is not known to be exact.
        """
        return cls(**gguf_vocabulary.read(metadata, source))
