"""Writes small valid or broken GGUF files for tests, independently of the project's own writer."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gguf
import numpy as np

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Typed(NamedTuple):
    """A metadata value with its GGUF type; the `value` of an array (type 9) is (element type, list)."""

    type: int
    value: Any


class Entry(NamedTuple):
    """A tensor: rows-first shape, ggml type number, bytes; `offset` overrides its offset in the directory."""

    name: str
    shape: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> Typed:
    """`value` with the type that llama.cpp's writer would choose."""
    if isinstance(value, Typed):
        return value
    if isinstance(value, bool):
        return Typed(7, value)
    if isinstance(value, int):
        return Typed(4, value)
    if isinstance(value, float):
        return Typed(6, value)
    if isinstance(value, str):
        return Typed(8, value)
    return Typed(9, (typed(value[0]).type, [typed(item).value for item in value]))


def payload(kind: int, value: Any) -> bytes:
    if kind == 8:
        return string(value)
    if kind == 9:
        element, items = value
        return struct.pack("<IQ", element, len(items)) + b"".join(payload(element, item) for item in items)
    return struct.pack("<" + SCALARS[kind], value)


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Sequence[Entry] = (), *, version: int = 3, alignment: int = 32
) -> bytes:
    """The bytes of a complete file."""
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, content = typed(value)
        head += string(key) + struct.pack("<I", kind) + payload(kind, content)
    body = b""
    for tensor in tensors:
        offset = len(body) if tensor.offset is None else tensor.offset
        dims = tuple(reversed(tensor.shape))
        head += string(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        head += struct.pack("<IQ", tensor.type, offset)
        body += tensor.data + b"\0" * (-len(tensor.data) % alignment)
    return head + b"\0" * (-len(head) % alignment) + body


def encoded(name: str, values: np.ndarray, type_name: str = "F32") -> Entry:
    """A float32 array as a tensor of a type that the gguf package can write."""
    kind = gguf.GGMLQuantizationType[type_name]
    return Entry(name, values.shape, int(kind), gguf.quants.quantize(values.astype(np.float32), kind).tobytes())


def to_interleaved(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Permute the rows of q or k from Hugging Face's RoPE order to GGUF's, as llama.cpp's converter does."""
    rows, columns = weight.shape
    return weight.reshape(n_heads, 2, rows // n_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
# GPT-2's alphabet: a printable character for every byte.
ALPHABET = [chr(byte) for byte in _PRINTABLE] + [chr(256 + i) for i in range(256 - len(_PRINTABLE))]
MERGES = ["t h", "i n", "th e"]
TOKENS = [*ALPHABET, "th", "in", "the", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": Typed(9, (5, [1] * (len(TOKENS) - 3) + [3] * 3)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": len(TOKENS) - 3,
    "tokenizer.ggml.eos_token_id": len(TOKENS) - 1,
}
