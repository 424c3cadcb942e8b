"""Reads shards of the tensors in safetensors files, and no other bytes of their data."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from mlx_llama3.checkpoint.folder import Checkpoint, CheckpointError, not_finite, weight_files
from mlx_llama3.checkpoint.quantization import Quantization
from mlx_llama3.checkpoint.tensor_shapes import expected_shapes
from mlx_llama3.system.safetensors_header import read_header

import mlx.core as mx

ROWS, COLUMNS = 0, 1
# Bytes of one read call; macOS refuses more than 2 GB.
MAX_READ_BYTES = 1 << 30

# Name of a type in safetensors -> the NumPy dtype that its bits are read into, and the MLX dtype.
_TYPES = {
    "BF16": (np.uint16, mx.bfloat16),
    "F16": (np.float16, mx.float16),
    "F32": (np.float32, mx.float32),
    "U8": (np.uint8, mx.uint8),
    "U32": (np.uint32, mx.uint32),
}


@dataclass(frozen=True)
class Shard:
    """Rows or columns (`axis`) of a matrix, from `start` to `end` (exclusive)."""

    axis: int
    start: int
    end: int


@dataclass(frozen=True)
class Slice:
    """A shard of a tensor in the file `path`, not read yet. `shape` and `dtype` are those of the array from `read`."""

    path: Path
    offset: int  # of the tensor, in bytes
    tensor_shape: tuple[int, ...]
    stored_dtype: str  # as safetensors names it
    shard: Shard | None  # None for the whole tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        return shard_shape(self.tensor_shape, self.shard)

    @property
    def dtype(self) -> mx.Dtype:
        """The MLX dtype."""
        return _TYPES[self.stored_dtype][1]

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.size * self.dtype.size

    def read(self) -> mx.array:
        """The shard, as an array; reads no other bytes."""
        bits, dtype = _TYPES[self.stored_dtype]
        part = np.empty(self.shape, bits)
        row = prod(self.tensor_shape[1:]) * part.itemsize
        with open(self.path, "rb", buffering=0) as file:
            if self.shard is None or self.shard.axis == ROWS:
                _read(file.fileno(), part, self.offset + (self.shard.start * row if self.shard else 0), self.path)
            else:
                first = self.offset + self.shard.start * part.itemsize
                for number, piece in enumerate(part):
                    _read(file.fileno(), piece, first + number * row, self.path)
        array = mx.array(part)
        return array if array.dtype == dtype else array.view(dtype)


class SlicedCheckpoint(Checkpoint):
    """A model folder of which only some shards are read.

    shards: the dense tensors to read, by name, and the shard of each; None for a whole tensor. A quantized tensor's
    scales and biases are read along with it.
    """

    def __init__(self, checkpoint: Checkpoint, shards: Mapping[str, Shard | None]) -> None:
        self.folder, self.args, self._quantization = checkpoint.folder, checkpoint.args, checkpoint._quantization
        self._dtype = checkpoint.dtype
        shapes = expected_shapes(checkpoint.args)
        self._n_weights = sum(prod(shard_shape(shapes[name], shard)) for name, shard in shards.items())
        stored = {name: entry for path in weight_files(checkpoint.folder) for name, entry in _stored(path).items()}
        self.weights = {}
        for name, shard in shards.items():
            module = name.removesuffix(".weight")
            quantization = checkpoint.quantization(module)
            self.weights[name] = Slice(*stored[name], _packed(shard, quantization))
            if quantization is not None:
                for key in {f"{module}.scales", f"{module}.biases"} & checkpoint.weights.keys():
                    self.weights[key] = Slice(*stored[key], _grouped(shard, quantization))

    @property
    def n_weights(self) -> int:
        """The number of weights in all shards, quantized ones counted unpacked."""
        return self._n_weights

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the whole model, so that all ranks use the same one."""
        return self._dtype

    def check_finite(self) -> None:
        """Does nothing: `pop` checks each shard when it reads it."""

    def pop(self, key: str) -> mx.array:
        """Read a tensor's shard, and remove it from `weights`. Raises `UserError` if it holds NaN or infinity."""
        tensor = self.weights.pop(key).read()
        # float16 sums overflow, and on the CPU 16-bit reductions are slow.
        if mx.issubdtype(tensor.dtype, mx.floating) and not mx.isfinite(mx.sum(tensor.astype(mx.float32))).item():
            raise not_finite(self.folder, key)
        return tensor


def shard_shape(shape: tuple[int, ...], shard: Shard | None) -> tuple[int, ...]:
    """The shape of a shard of a tensor of the shape `shape`."""
    return tuple(shard.end - shard.start if shard and axis == shard.axis else n for axis, n in enumerate(shape))


def _packed(shard: Shard | None, quantization: Quantization | None) -> Shard | None:
    """From the shard of a dense matrix to the shard of its packed weights, whose columns are words of 32 bits."""
    if shard is None or quantization is None or shard.axis == ROWS:
        return shard
    return Shard(COLUMNS, shard.start * quantization.bits // 32, shard.end * quantization.bits // 32)


def _grouped(shard: Shard | None, quantization: Quantization) -> Shard | None:
    """From the shard of a dense matrix to the shard of its scales or biases, which have one column per group."""
    if shard is None or shard.axis == ROWS:
        return shard
    return Shard(COLUMNS, shard.start // quantization.group_size, shard.end // quantization.group_size)


def _stored(path: Path) -> dict[str, tuple[Path, int, tuple[int, ...], str]]:
    """Path, offset, shape and type of each tensor of a file, for `Slice`. `Checkpoint` has checked the file."""
    header = read_header(path)
    return {
        name: (path, header.data_start + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"])
        for name, entry in header.entries.items()
    }


def _read(file: int, buffer: np.ndarray, offset: int, path: Path) -> None:
    """Fill `buffer` with the bytes of an open file from `offset` on."""
    view = memoryview(buffer).cast("B")
    while view:
        count = os.preadv(file, [view[:MAX_READ_BYTES]], offset)
        if not count:
            raise CheckpointError(f"{path}: the file ends too early; download or convert the model again")
        view, offset = view[count:], offset + count
