"""Parts of the tensors in safetensors files, read without the rest of them."""

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
# More than 2 GB in one call is refused by macOS.
AT_ONCE = 1 << 30

# safetensors' name: how NumPy holds the bits, and what they mean.
_TYPES = {
    "BF16": (np.uint16, mx.bfloat16),
    "F16": (np.float16, mx.float16),
    "F32": (np.float32, mx.float32),
    "U8": (np.uint8, mx.uint8),
    "U32": (np.uint32, mx.uint32),
}


@dataclass(frozen=True)
class Shard:
    """Rows or columns (`axis`) of a matrix, `start` up to `end`."""

    axis: int
    start: int
    end: int


@dataclass(frozen=True)
class Slice:
    """A tensor's part, not read yet: of `tensor` in `path`, with the shape and type of what `read` gives."""

    path: Path
    offset: int  # of the tensor, in bytes
    whole: tuple[int, ...]
    stored: str
    shard: Shard | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return shard_shape(self.whole, self.shard)

    @property
    def dtype(self) -> mx.Dtype:
        """As MLX has it."""
        return _TYPES[self.stored][1]

    @property
    def size(self) -> int:
        """Numbers."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.size

    def read(self) -> mx.array:
        """The part; reads no byte of the rest."""
        bits, dtype = _TYPES[self.stored]
        part = np.empty(self.shape, bits)
        row = prod(self.whole[1:]) * part.itemsize
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
    """A model folder of which only parts are read: `shards` of dense tensors by name, None for all of one.

    What `shards` does not name is left out.
    """

    def __init__(self, whole: Checkpoint, shards: Mapping[str, Shard | None]) -> None:
        self.folder, self.args, self._quantization = whole.folder, whole.args, whole._quantization
        self._dtype = whole.dtype
        shapes = expected_shapes(whole.args)
        self._n_weights = sum(prod(shard_shape(shapes[name], shard)) for name, shard in shards.items())
        stored = {name: entry for path in weight_files(whole.folder) for name, entry in _stored(path).items()}
        self.weights = {}
        for name, shard in shards.items():
            module = name.removesuffix(".weight")
            quantization = whole.quantization(module)
            self.weights[name] = Slice(*stored[name], _packed(shard, quantization))
            if quantization is not None:
                for key in {f"{module}.scales", f"{module}.biases"} & whole.weights.keys():
                    self.weights[key] = Slice(*stored[key], _grouped(shard, quantization))

    @property
    def n_weights(self) -> int:
        """Numbers in all parts, quantized ones unpacked."""
        return self._n_weights

    @property
    def dtype(self) -> mx.Dtype:
        """That of the whole model, so that all ranks have the same."""
        return self._dtype

    def check_finite(self) -> None:
        """Nothing yet: `pop` checks each part when it is read, once."""

    def pop(self, key: str) -> mx.array:
        """Read a tensor's shard, and remove it from `weights`. Raises `UserError` if it holds NaN or infinity."""
        tensor = self.weights.pop(key).read()
        # float16 sums overflow, and on the CPU 16-bit reductions are slow.
        if mx.issubdtype(tensor.dtype, mx.floating) and not mx.isfinite(mx.sum(tensor.astype(mx.float32))).item():
            raise not_finite(self.folder, key)
        return tensor


def shard_shape(whole: tuple[int, ...], shard: Shard | None) -> tuple[int, ...]:
    """Of a tensor with the shape `whole`, cut."""
    return tuple(shard.end - shard.start if shard and axis == shard.axis else n for axis, n in enumerate(whole))


def _packed(shard: Shard | None, quantization: Quantization | None) -> Shard | None:
    """Where a cut of a dense matrix runs in its packed weights, 32 bits a column."""
    if shard is None or quantization is None or shard.axis == ROWS:
        return shard
    return Shard(COLUMNS, shard.start * quantization.bits // 32, shard.end * quantization.bits // 32)


def _grouped(shard: Shard | None, quantization: Quantization) -> Shard | None:
    """Where it runs in its scales or biases, one a group."""
    if shard is None or shard.axis == ROWS:
        return shard
    return Shard(COLUMNS, shard.start // quantization.group_size, shard.end // quantization.group_size)


def _stored(path: Path) -> dict[str, tuple[Path, int, tuple[int, ...], str]]:
    """Path, offset, shape and type of each tensor of a file, for `Slice`. `Checkpoint` has checked the file before."""
    header = read_header(path)
    return {
        name: (path, header.data_start + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"])
        for name, entry in header.entries.items()
    }


def _read(file: int, into: np.ndarray, offset: int, path: Path) -> None:
    """Fill `into` from `offset` on."""
    view = memoryview(into).cast("B")
    while view:
        count = os.preadv(file, [view[:AT_ONCE]], offset)
        if not count:
            raise CheckpointError(f"{path}: the file ends too early; download or convert the model again")
        view, offset = view[count:], offset + count
