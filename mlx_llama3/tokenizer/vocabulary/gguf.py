"""The vocabulary in a GGUF's metadata, keys `tokenizer.ggml.*` (llama.cpp, `gguf-py/gguf/constants.py`)."""

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
    """The fields of `Vocabulary`; values of the metadata may be lists, scalars, or arrays of NumPy or MLX.

    Raises `UserError` for anything but byte-level BPE with a known pre-tokenizer.
    """

    def value(key: str) -> Any:
        found = metadata.get(f"tokenizer.ggml.{key}")
        return found.tolist() if hasattr(found, "tolist") else found

    names, merges = value("tokens"), value("merges")
    if not names:
        raise UserError(f"{source}: holds no vocabulary (tokenizer.ggml.tokens)")
    for key, kind in (("tokens", str), ("merges", str), ("token_type", int)):
        found = value(key)
        if found is not None and not (isinstance(found, list) and set(map(type, found)) <= {kind}):
            raise UserError(f"{source}: tokenizer.ggml.{key} is not what it should be; fetch the file again")
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
    found = value(f"{kind}_token_id")
    if found is not None and not (type(found) is int and 0 <= found < count):
        raise UserError(f"{source}: tokenizer.ggml.{kind}_token_id is {found!r:.60}; there are {count} tokens")
    return found


def _check_byte_level(model: str, names: Sequence[str], merges: Sequence[str] | None, source: str) -> None:
    # A file may say `llama` (SentencePiece) of a byte-level vocabulary: the space, `Ġ` here and `▁` there, tells.
    byte_level = merges and "Ġ" in names and "▁" not in names
    if model == "gpt2" and not merges:
        raise UserError(f"{source}: holds no merges (tokenizer.ggml.merges); convert it from another file")
    if model not in ("gpt2", "llama") or not byte_level:
        kind = "SentencePiece, as of Llama 1 and 2" if model == "llama" else f"{model!r}"
        raise UserError(
            f"{source}: the vocabulary is {kind} (tokenizer.ggml.model); byte-level BPE ('gpt2') is supported"
        )


def _pre_tokenizer(name: str | None, names: Sequence[str], source: str) -> PreTokenizer:
    # Files of the first weeks of Llama 3 were written before the key existed.
    if name in (None, "default") and "<|begin_of_text|>" in names and "<|eot_id|>" in names:
        return LLAMA3
    return pretokenizers.from_gguf(str(name), source)


def _sort(
    names: Sequence[str], kinds: Sequence[int], merges: Sequence[str]
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Words in the byte alphabet, control tokens, plain added tokens, name -> id each; unused ones are left out."""
    made = {merge.replace(" ", "") for merge in merges}
    words, added = {}, []
    for n, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            added.append((name, n, kind != _USER_DEFINED))
        elif kind == _NORMAL and has_control_form(name) and name not in made:
            added.append((name, n, True))  # older files mark every token as normal
        elif kind == _NORMAL:
            words[name] = n
    return words, *classify(added)
