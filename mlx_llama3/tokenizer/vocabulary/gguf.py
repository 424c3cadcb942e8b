"""Reads the vocabulary from a GGUF's metadata, keys `tokenizer.ggml.*` (llama.cpp, `gguf-py/gguf/constants.py`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.vocabulary import pretokenizers
from mlx_llama3.tokenizer.vocabulary.added_tokens import classify, has_control_form, token_table
from mlx_llama3.tokenizer.vocabulary.bpe_ranks import to_ranks
from mlx_llama3.tokenizer.vocabulary.byte_level import to_bytes
from mlx_llama3.tokenizer.vocabulary.pretokenizers import LLAMA3, PreTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type; 5 is unused, 6 a byte


def read(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields of `Vocabulary`. The metadata's values may be lists, scalars, or arrays of NumPy or MLX.

    Raises `UserError` for anything but byte-level BPE with a known pre-tokenizer.
    """

    def value(key: str) -> Any:
        raw = metadata.get(f"tokenizer.ggml.{key}")
        return raw.tolist() if hasattr(raw, "tolist") else raw

    names, merges = value("tokens"), value("merges")
    if not names:
        raise UserError(f"{source}: holds no vocabulary (tokenizer.ggml.tokens)")
    for key, kind, plural in (("tokens", str, "texts"), ("merges", str, "texts"), ("token_type", int, "integers")):
        entries = value(key)
        if entries is not None and not (isinstance(entries, list) and set(map(type, entries)) <= {kind}):
            raise UserError(f"{source}: tokenizer.ggml.{key} must be a list of {plural}; fetch the file again")
    _check_byte_level(value("model"), names, merges, source)
    pre_tokenizer = _pre_tokenizer(value("pre"), names, source)
    kinds = value("token_type") or [_NORMAL] * len(names)
    if len(kinds) != len(names):
        raise UserError(f"{source}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(names)} tokens")

    words, special, added = _sort(names, kinds, merges)
    tokens = token_table(zip(to_bytes(list(words)), words.values(), strict=True), special, added)
    tokens += [b""] * (len(names) - len(tokens))
    ranks, ids = to_ranks(words, merges, tokens, source)
    bos, *ends = (_id(value, kind, len(names), source) for kind in ("bos", "eos", "eot", "eom"))
    add_bos = value("add_bos_token")
    return {
        "tokens": tokens,
        "ranks": ranks,
        "ids": ids,
        "special": special,
        "added": added,
        "pre_tokenizer": pre_tokenizer,
        "bos_id": bos,
        "eos_ids": tuple(dict.fromkeys(n for n in ends if n is not None)),
        "add_bos": bos is not None and (pre_tokenizer is LLAMA3 if add_bos is None else bool(add_bos)),
        "merges": merges,
    }


def _id(value: Callable[[str], Any], kind: str, count: int, source: str) -> int | None:
    token = value(f"{kind}_token_id")
    if token is not None and not (type(token) is int and 0 <= token < count):
        raise UserError(f"{source}: tokenizer.ggml.{kind}_token_id is {token!r:.60}; there are {count} tokens")
    return token


def _check_byte_level(model: str, names: Sequence[str], merges: Sequence[str] | None, source: str) -> None:
    # Some files declare `llama` (SentencePiece) for a byte-level vocabulary. The space distinguishes them: it is `Ġ` in
    # byte-level BPE and `▁` in SentencePiece.
    byte_level = merges and "Ġ" in names and "▁" not in names
    if model == "gpt2" and not merges:
        raise UserError(f"{source}: holds no merges (tokenizer.ggml.merges); convert it from another file")
    if model not in ("gpt2", "llama") or not byte_level:
        kind = "SentencePiece, as of Llama 1 and 2" if model == "llama" else f"{model!r}"
        raise UserError(
            f"{source}: the vocabulary is {kind} (tokenizer.ggml.model); byte-level BPE ('gpt2') is supported"
        )


def _pre_tokenizer(name: str | None, names: Sequence[str], source: str) -> PreTokenizer:
    # Files of Llama 3's first weeks were written before the key existed.
    if name in (None, "default") and "<|begin_of_text|>" in names and "<|eot_id|>" in names:
        return LLAMA3
    return pretokenizers.from_gguf(str(name), source)


def _sort(
    names: Sequence[str], kinds: Sequence[int], merges: Sequence[str]
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Words in the byte alphabet, control tokens and plain added tokens, each name -> id; without unused ones."""
    merged = {merge.replace(" ", "") for merge in merges}
    words, added = {}, []
    for n, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            added.append((name, n, kind != _USER_DEFINED))
        elif kind == _NORMAL and has_control_form(name) and name not in merged:
            added.append((name, n, True))  # older files mark every token as normal
        elif kind == _NORMAL:
            words[name] = n
    return words, *classify(added)
