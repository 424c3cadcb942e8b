"""A tensor in a file: the location of its bytes, and reads of its rows through a memory map.

Only the rows that are read are mapped, and they are unmapped when the array over them is freed. So a checkpoint of any
size needs no more memory than one block. (With a mapping of the whole file, every page once read would count.)
"""

import mmap
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlx_llama3.errors import UserError

import mlx.core as mx

# safetensors' name of a dtype -> numpy dtype of its bits, MLX dtype. numpy has no bfloat16; its bits are uint16.
DTYPES: dict[str, tuple[np.dtype, mx.Dtype | None]] = {
    "F32": (np.dtype("<f4"), mx.float32),
    "F16": (np.dtype("<f2"), mx.float16),
    "BF16": (np.dtype("<u2"), mx.bfloat16),
    "F64": (np.dtype("<f8"), None),
    "I8": (np.dtype("i1"), mx.int8),
    "U8": (np.dtype("u1"), mx.uint8),
    "I16": (np.dtype("<i2"), mx.int16),
    "U16": (np.dtype("<u2"), mx.uint16),
    "I32": (np.dtype("<i4"), mx.int32),
    "U32": (np.dtype("<u4"), mx.uint32),
    "I64": (np.dtype("<i8"), mx.int64),
    "U64": (np.dtype("<u8"), mx.uint64),
    "BOOL": (np.dtype("?"), mx.bool_),
    "C64": (np.dtype("<c8"), mx.complex64),
    "F8_E4M3": (np.dtype("u1"), None),
    "F8_E5M2": (np.dtype("u1"), None),
}
WEIGHT_DTYPES = ("F32", "F16", "BF16")
_CHECKSUM_BLOCK = 1 << 24


class Checksum(NamedTuple):
    """A CRC-32 that a file states for a range of its bytes."""

    path: Path
    name: str
    offset: int
    nbytes: int
    crc32: int

    def verify(self) -> None:
        """Read the range; raise `UserError` if its CRC-32 differs."""
        crc = 0
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            remaining = self.nbytes
            while remaining and (block := file.read(min(remaining, _CHECKSUM_BLOCK))):
                crc = zlib.crc32(block, crc)
                remaining -= len(block)
        if crc != self.crc32:
            raise UserError(
                f"{self.path}: the bytes of {self.name} do not match their checksum; "
                "the file is damaged, fetch it again"
            )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: `dtype` by its safetensors name, `offset` in bytes into the file, strides in elements."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    checksum: Checksum | None = None

    @property
    def origin(self) -> str:
        """File and tensor, for messages."""
        return f"{self.path.name}: {self.name}"

    @property
    def mx_dtype(self) -> mx.Dtype:
        """The MLX dtype; raises `UserError` if MLX has none for these values."""
        dtype = DTYPES[self.dtype][1]
        if dtype is None:
            raise UserError(
                f"{self.path}: {self.name} is stored as {self.dtype}, which cannot be read; take a 16-bit file"
            )
        return dtype

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The bits of rows `start` to `stop` of axis 0 (bfloat16 as uint16), a view of a mapped range of the file."""
        dtype = DTYPES[self.dtype][0]
        shape = (stop - start, *self.shape[1:])
        if 0 in shape:
            return np.empty(shape, dtype)
        extent = sum((axis - 1) * stride for axis, stride in zip(shape, self.strides, strict=True)) + 1
        begin = self.offset + start * self.strides[0] * dtype.itemsize
        map_begin = begin - begin % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            try:
                mapped = mmap.mmap(
                    file.fileno(),
                    begin - map_begin + extent * dtype.itemsize,
                    offset=map_begin,
                    access=mmap.ACCESS_READ,
                )
            except ValueError as error:
                raise UserError(f"{self.path}: became shorter while {self.name} was read; fetch it again") from error
        strides = tuple(stride * dtype.itemsize for stride in self.strides)
        return np.ndarray(shape, dtype, buffer=mapped, offset=begin - map_begin, strides=strides)


def to_mlx(bits: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Copy bits, as `StoredTensor.rows` returns them, into an MLX array of `dtype`; no value is converted."""
    bits = np.require(bits, requirements=["C", "A"])
    if dtype == mx.bfloat16:
        return mx.array(bits).view(mx.bfloat16)
    return mx.array(bits)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major array: (2, 3, 4) -> (12, 4, 1)."""
    strides = [1]
    for axis in reversed(shape[1:]):
        strides.append(strides[-1] * axis)
    return tuple(reversed(strides)) if shape else ()
