"""Builds the metadata of a GGUF for llama.cpp: model and tokenizer.

Keys: llama.cpp `gguf-py/gguf/constants.py`; values as `convert_hf_to_gguf.py` writes them for Llama models.
"""

import re
from collections.abc import Mapping
from typing import Any

from convert.gguf.reader import GGUFError
from convert.gguf.rope_factors import ORIGINAL_MAX_POSITION
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.tokenizer.vocabulary.bpe_ranks import to_merges
from mlx_llama3.tokenizer.vocabulary.byte_level import to_text
from mlx_llama3.tokenizer.vocabulary.vocabulary import Vocabulary

# general.file_type: llama.cpp `llama.h`, `llama_ftype`.
FILE_TYPES = {"F16": 1, "Q4_1": 3, "Q8_0": 7}
TEMPLATE = "tokenizer.chat_template"
# Stop tokens of Llama 3, besides the EOS token that the file names.
LLAMA3_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_QUANTIZATION_VERSION = 2
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


def model_metadata(args: ModelArgs, name: str, type_name: str) -> dict[str, Any]:
    """The keys `general.*` and `llama.*`.

    RoPE scaling is in the tensor `rope_freqs.weight`. Only the original context length cannot be derived from it; that
    is a key here if it is not Llama's.
    """
    scaling = args.rope_scaling
    unusual = scaling is not None and scaling.original_max_position != ORIGINAL_MAX_POSITION
    original = {"llama.rope.scaling.original_context_length": scaling.original_max_position} if unusual else {}
    return original | {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": name,
        "general.file_type": FILE_TYPES[type_name],
        "general.quantization_version": _QUANTIZATION_VERSION,
        "llama.block_count": args.n_layers,
        "llama.context_length": args.max_seq_len,
        "llama.embedding_length": args.dim,
        "llama.feed_forward_length": args.hidden_dim,
        "llama.attention.head_count": args.n_heads,
        "llama.attention.head_count_kv": args.n_kv_heads,
        "llama.attention.key_length": args.head_dim,
        "llama.attention.value_length": args.head_dim,
        "llama.attention.layer_norm_rms_epsilon": args.norm_eps,
        "llama.rope.dimension_count": args.head_dim,
        "llama.rope.freq_base": args.rope_theta,
        "llama.vocab_size": args.vocab_size,
    }


def tokenizer_metadata(
    vocabulary: Vocabulary, vocab_size: int, chat_template: str | Mapping[str, str] | None
) -> dict[str, Any]:
    """The keys `tokenizer.*`. The ids of `vocabulary.eos_ids` are written up to three: see `unwritten_stop_ids`.

    Args:
        chat_template: Jinja text, or texts by name (`default`, `tool_use`).
        vocab_size: rows of the embedding; ids beyond the vocabulary get a placeholder name and the type "unused".

    Raises:
        GGUFError: the vocabulary has more tokens than the embedding has rows.
    """
    if len(vocabulary.tokens) > vocab_size:
        raise GGUFError(f"the tokenizer has {len(vocabulary.tokens)} tokens, the embedding only {vocab_size} rows")
    names, kinds = _tokens(vocabulary, vocab_size)
    ids = {"bos": vocabulary.bos_id, **_ends(vocabulary), "unknown": vocabulary.unknown_id}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": vocabulary.pre_tokenizer.gguf[0],
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(vocabulary.merges or to_merges(vocabulary.ranks)),
        **{f"tokenizer.ggml.{kind}_token_id": number for kind, number in ids.items() if number is not None},
        "tokenizer.ggml.add_bos_token": vocabulary.add_bos,
        "tokenizer.ggml.add_space_prefix": False,
        **_templates({"default": chat_template} if isinstance(chat_template, str) else chat_template or {}),
    }


def unwritten_stop_ids(vocabulary: Vocabulary) -> list[int]:
    """The ids of `vocabulary.eos_ids` that a GGUF has no key for; llama.cpp knows Llama 3's own by name."""
    written = {*_ends(vocabulary).values(), *(vocabulary.special.get(name) for name in LLAMA3_ENDS)}
    return [n for n in vocabulary.eos_ids if n not in written]


def _ends(vocabulary: Vocabulary) -> dict[str, int | None]:
    """The ids of the end of text, of a turn and of a message. What Llama 3 has no token for takes other stop ids."""
    eos = next(iter(vocabulary.eos_ids), None)
    ends = {"eos": eos, "eot": vocabulary.special.get("<|eot_id|>"), "eom": vocabulary.special.get("<|eom_id|>")}
    others = [n for n in vocabulary.eos_ids if n not in ends.values()]
    return {key: others.pop(0) if n is None and others else n for key, n in ends.items()}


def _templates(templates: Mapping[str, str]) -> dict[str, Any]:
    """Chat templates as gguf-py writes them (`GGUFWriter.add_chat_template`): named ones have keys of their own."""
    named = {re.sub("[^a-zA-Z0-9]", "_", name): text for name, text in templates.items() if name != "default"}
    keys: dict[str, Any] = {f"{TEMPLATE}.{name}": text for name, text in named.items()}
    keys |= {"tokenizer.chat_templates": list(named)} if named else {}
    return keys | ({TEMPLATE: templates["default"]} if templates.get("default") else {})


def _tokens(vocabulary: Vocabulary, vocab_size: int) -> tuple[list[str], list[int]]:
    names = [to_text(token) or f"[PAD{number}]" for number, token in enumerate(vocabulary.tokens)]
    kinds = [_NORMAL if token else _UNUSED for token in vocabulary.tokens]
    for table, kind in ((vocabulary.special, _CONTROL), (vocabulary.added, _USER_DEFINED)):
        for name, number in table.items():
            names[number], kinds[number] = name, kind
    beyond = range(len(names), vocab_size)
    return names + [f"[PAD{number}]" for number in beyond], kinds + [_UNUSED] * len(beyond)
