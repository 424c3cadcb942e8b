"""Writes a GGUF file (version 3) as a stream: the header, then each tensor in blocks of rows."""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from convert.gguf.reader import ARRAY, BOOL, DEFAULT_ALIGNMENT, MAGIC, STRING
from convert.gguf.types import LAYOUTS, TYPE_NUMBERS

VERSION = 3
_U32, _I32, _F32 = 4, 5, 6


@dataclass(frozen=True)
class TensorOutput:
    """A tensor to write: shape with rows first, GGUF type, and its stored rows in blocks, uint8 (rows, row bytes)."""

    name: str
    shape: tuple[int, ...]
    type: str
    blocks: Callable[[], Iterator[np.ndarray]]

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor in the file, without padding."""
        layout = LAYOUTS[self.type]
        return int(np.prod(self.shape)) // layout.values * layout.n_bytes


def write_gguf(file: BinaryIO, metadata: Mapping[str, Any], tensors: Sequence[TensorOutput]) -> None:
    """Write a complete GGUF file.

    Args:
        metadata: bool, int (as uint32), float (as float32), str, and lists of str, of int (as int32) or of float.
        tensors: the tensors, in their order in the file.

    Raises:
        ValueError: the blocks of a tensor are not as many bytes as its shape and type need.
    """
    file.write(_padded(_header(metadata, tensors)))
    for tensor in tensors:
        written = 0
        for block in tensor.blocks():
            file.write(block.data)
            written += block.nbytes
        if written != tensor.n_bytes:
            raise ValueError(f"tensor {tensor.name}: {written} bytes came, its shape and type mean {tensor.n_bytes}")
        file.write(bytes(-written % DEFAULT_ALIGNMENT))


def file_size(metadata: Mapping[str, Any], tensors: Sequence[TensorOutput]) -> int:
    """Bytes that `write_gguf` will write."""
    return len(_padded(_header(metadata, tensors))) + sum(_aligned(tensor.n_bytes) for tensor in tensors)


def _aligned(n_bytes: int) -> int:
    return n_bytes + -n_bytes % DEFAULT_ALIGNMENT


def _padded(data: bytes) -> bytes:
    return data.ljust(_aligned(len(data)), b"\0")


def _header(metadata: Mapping[str, Any], tensors: Sequence[TensorOutput]) -> bytes:
    parts = [struct.pack("<4sIQQ", MAGIC, VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, payload = _value(value)
        parts += [_string(key), struct.pack("<I", kind), payload]
    offset = 0
    for tensor in tensors:
        rank = len(tensor.shape)
        parts.append(_string(tensor.name))
        parts.append(struct.pack(f"<I{rank}Q", rank, *reversed(tensor.shape)))
        parts.append(struct.pack("<IQ", TYPE_NUMBERS[tensor.type], offset))
        offset += _aligned(tensor.n_bytes)
    return b"".join(parts)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> tuple[int, bytes]:
    """GGUF type and bytes of one metadata value."""
    if isinstance(value, bool):
        return BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return _U32, struct.pack("<I", value)
    if isinstance(value, float):
        return _F32, struct.pack("<f", value)
    if isinstance(value, str):
        return STRING, _string(value)
    return ARRAY, _array(value)


def _array(items: Sequence[Any]) -> bytes:
    if isinstance(items[0], str):
        return struct.pack("<IQ", STRING, len(items)) + b"".join(map(_string, items))
    kind, code = (_F32, "f") if isinstance(items[0], float) else (_I32, "i")
    return struct.pack(f"<IQ{len(items)}{code}", kind, len(items), *items)
