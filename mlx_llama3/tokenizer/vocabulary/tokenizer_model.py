"""Reads Meta's `tokenizer.model` of Llama 3 (each line a base64 token and its rank), and has its special tokens."""

from binascii import a2b_base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mlx_llama3.errors import UserError
from mlx_llama3.system.files import read_bytes

Llama3Version = Literal["3.0", "3.1"]

_SPECIAL = {
    "3.0": {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        9: "<|eot_id|>",
    }
}
_SPECIAL["3.1"] = _SPECIAL["3.0"] | {
    4: "<|finetune_right_pad_id|>",
    5: "<|step_id|>",
    8: "<|eom_id|>",
    10: "<|python_tag|>",
    11: "<|image|>",
}


def special_tokens(version: Llama3Version, first_id: int = 128000) -> dict[str, int]:
    """The 256 special tokens of Llama 3.0, or of 3.1 and later (Meta `llama3/tokenizer.py` of each version).

    Their ids follow the ranks. In 3.0, 128004, 128008 (`<|eom_id|>` in 3.1) and 128010 (`<|python_tag|>`) are reserved
    like most others.
    """
    named = _SPECIAL[version]
    unnamed = [n for n in range(256) if n not in named]
    names = named | {n: f"<|reserved_special_token_{count}|>" for count, n in enumerate(unnamed)}
    return {names[n]: first_id + n for n in range(256)}


def llama3_version(config: Mapping[str, Any]) -> Llama3Version:
    """The version of a model with this `config.json` or `params.json`: RoPE is scaled since 3.1, but not in 3.0."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else "default"
    return "3.1" if kind != "default" or config.get("use_scaled_rope") else "3.0"


def read_ranks(path: Path) -> dict[bytes, int]:
    """bytes -> rank, in rank order: 0, 1, 2, ...

    Raises `UserError` for a SentencePiece model (Llama 1 and 2), and for a file that is damaged or cut off.
    """
    data = read_bytes(path)
    if data.startswith(b"\n"):  # the tag of protobuf's first field
        raise UserError(
            f"{path}: this is a SentencePiece model, as of Llama 1 and 2; expected the tiktoken file of Llama 3"
        )
    words = data.split()
    try:
        ranks = dict(zip(map(a2b_base64, words[::2]), map(int, words[1::2]), strict=True))
    except ValueError:
        raise UserError(f"{path}: expected lines of a base64 token and its rank; fetch the file again") from None
    if list(ranks.values()) != list(range(len(words) // 2)) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise UserError(f"{path}: expected ranks 0, 1, 2, ... and every single byte; fetch the file again")
    return ranks
