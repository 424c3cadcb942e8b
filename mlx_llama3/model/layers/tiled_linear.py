"""Dense matrix products for MLX's CPU backend: the matrix is stored in tiles and split over all cores.

MLX runs each CPU stream on its own thread, so a product whose output columns are split over the streams uses all cores.
A multithreaded BLAS would do the same, but its threads spin while they wait for each other: as fast on an idle machine,
ten times slower on a busy one.

A decoded token reads every weight once, so memory bandwidth sets its time. OpenBLAS reaches that bandwidth only in its
small-matrix kernels (AVX-512), which do not copy the matrix into panels first, and those are fastest if 64 columns are
adjacent in memory. So a matrix is stored in tiles of 64 columns. Compared with rows, this is twice as fast for one row
of x, and up to five times for a few. MLX's own reference BLAS gains from tiles too.
"""

import math
import os
import threading
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

# More streams than this only wait for memory.
_MOST_STREAMS = 8
# Columns of a tile: four vector registers of 16 numbers.
TILE = 64
# Most multiplications of one product for which OpenBLAS uses its small-matrix kernels.
_SMALL_PRODUCT = 1_000_000
# With more rows of x than this, groups of fewer than 4 rows do not pay.
_FEW_ROWS = 64
# MLX 0.32 indexes batched matmuls with 32 bits, broadcast copies included; beyond that it reads out of bounds.
_BATCH_INDICES = 1 << 31
# Bytes of a matrix below which one thread multiplies one row of x before another thread wakes up.
_ONE_THREAD_BYTES = 2_500_000
# exp(x) = 2 ** (x * LOG2_E). On a CPU, MLX takes 12 ns a number for exp, 14 for sigmoid, and 5 for a power of two.
LOG2_E = math.log2(math.e)
# Bytes of a matrix that a stream dequantizes at a time.
_BLOCK_BYTES = 1 << 22

_local = threading.local()


@cache
def n_cpu_streams() -> int:
    """The number of CPU streams: one for each core that this process may use, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_STREAMS)


def cpu_streams() -> list[mx.Stream]:
    """The calling thread's CPU streams, its default one first. MLX's streams belong to the thread that made them."""
    if not hasattr(_local, "streams"):
        _local.streams = [
            mx.default_stream(mx.cpu),
            *(mx.new_stream(mx.cpu) for _ in range(n_cpu_streams() - 1)),
        ]
    return _local.streams


def split_ranges(size: int) -> list[tuple[int, int]]:
    """Split `size` over the CPU streams: (begin, end) of each stream's range."""
    n = min(n_cpu_streams(), size)
    return list(pairwise(size * i // n for i in range(n + 1)))


def tiled(weight: mx.array) -> mx.array:
    """A matrix `(rows, in)` as tiles `(n, in, 64)`, each the transpose of 64 rows; the last is padded with zeros."""
    rows, width = weight.shape
    if rows % TILE:
        weight = mx.pad(weight, [(0, -rows % TILE), (0, 0)])
    return mx.contiguous(weight.reshape(-1, TILE, width).swapaxes(1, 2))


def tiled_matmul(x: mx.array, tiles: mx.array) -> mx.array:
    """`(1, count, in)` times tiles `(n, in, 64)` -> `(n, count, 64)`, which `untiled` puts in order.

    Call both on the same stream: a second stream that used the product would make this one wait.
    """
    count = x.shape[1]
    if count == 1:
        return x @ tiles
    n, width, _ = tiles.shape
    if count * width * n >= _BATCH_INDICES:
        return mx.concatenate(
            [tiled_matmul(x[:, : count // 2], tiles), tiled_matmul(x[:, count // 2 :], tiles)], axis=1
        )
    groups, rows = _row_groups(count, width)
    if groups == 1 or groups * TILE * width * n >= _BATCH_INDICES:
        return x @ tiles
    if groups * rows > count:
        x = mx.pad(x, [(0, 0), (0, groups * rows - count), (0, 0)])
    y = x.reshape(groups, rows, width) @ mx.expand_dims(tiles, 1)  # (n, groups, rows, 64)
    return y.reshape(n, -1, TILE)[:, :count]


def untiled(y: mx.array) -> mx.array:
    """`(n, count, 64)` -> `(1, count, 64 n)`."""
    count = y.shape[1]
    return (y.swapaxes(0, 1) if count > 1 else y).reshape(1, count, -1)


@cache
def _row_groups(count: int, width: int) -> tuple[int, int]:
    """(groups, rows per group) for `count` rows of x, small enough for OpenBLAS's no-copy kernels.

    It is (1, count) if splitting does not pay: many rows in groups of fewer than 4. The last group may be short.
    """
    most = max(1, _SMALL_PRODUCT // (TILE * width))
    if count <= most or (count > _FEW_ROWS and most < 4):
        return 1, count
    groups = -(-count // most)
    groups = next((n for n in range(groups, 2 * groups) if count % n == 0), groups)
    return groups, -(-count // groups)


@dataclass(frozen=True)
class _SplitTiles:
    """A matrix's tiles, split over the CPU streams.

    parts: one view of `tiles` for each stream. one_thread: one row of x is multiplied faster without splitting.
    """

    tiles: mx.array
    parts: tuple[mx.array, ...]
    one_thread: bool

    @classmethod
    def split(cls, tiles: mx.array) -> "_SplitTiles":
        parts = tuple(tiles[a:b] for a, b in split_ranges(tiles.shape[0]))
        mx.eval(parts)  # a lazy array belongs to this thread's stream; an evaluated one can be used in any thread
        return cls(tiles, parts, tiles.nbytes < _ONE_THREAD_BYTES)


class TiledLinear(nn.Module):
    """`nn.Linear` without bias, whose `weight` `(out, in)` is stored as tiles."""

    def __init__(self, weight: mx.array) -> None:
        super().__init__()
        self.weight = weight

    @classmethod
    def from_tiles(cls, tiles: mx.array, rows: int) -> "TiledLinear":
        """A layer from tiles `(n, in, 64)` of a matrix with `rows` rows, which is not built."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._set_tiles(tiles, rows)
        return module

    def __setattr__(self, name: str, value: object) -> None:
        if name == "weight":
            self._set_tiles(tiled(value), value.shape[0])
        else:
            super().__setattr__(name, value)

    def _set_tiles(self, tiles: mx.array, rows: int) -> None:
        self.tiles, self._rows = tiles, rows
        self._split: _SplitTiles | None = None

    @property
    def weight(self) -> mx.array:
        """The matrix `(out, in)`, rebuilt from the tiles on every read: not for products."""
        return self.tiles.swapaxes(1, 2).reshape(-1, self.tiles.shape[1])[: self._rows]

    def row(self, index: int) -> mx.array:
        """One row `(in,)`, read from its tile."""
        return self.tiles[index // TILE, :, index % TILE]

    def __call__(self, x: mx.array) -> mx.array:
        """`(..., in)` -> `(..., out)`."""
        shape = x.shape
        x = x.reshape(1, -1, shape[-1])
        if self._split is None or self._split.tiles is not self["tiles"]:  # `nn.Module.update` replaces the tiles
            self._split = _SplitTiles.split(self["tiles"])
        if self._split.one_thread and x.shape[1] == 1:
            y = untiled(tiled_matmul(x, self["tiles"]))
        else:
            products = []
            for part, stream in zip(self._split.parts, cpu_streams(), strict=False):
                with mx.stream(stream):
                    products.append(untiled(tiled_matmul(x, part)))
            y = mx.concatenate(products, axis=-1)
        if self._rows % TILE:
            y = y[..., : self._rows]
        return y.reshape(*shape[:-1], self._rows)


class TiledEmbedding(TiledLinear):
    """`nn.Embedding`, whose `weight` `(vocab_size, dim)` is stored as tiles."""

    def __call__(self, tokens: mx.array) -> mx.array:
        """Token ids `(...)` -> `(..., dim)`."""
        return self.tiles.swapaxes(1, 2)[tokens // TILE, tokens % TILE]

    def as_linear(self, x: mx.array) -> mx.array:
        """The product of a tied head: `(..., dim)` -> `(..., vocab_size)`."""
        return super().__call__(x)


def use_tiled_layers(model: nn.Module, dtype: mx.Dtype) -> None:
    """Replace all linear layers and embeddings of `model` by tiled ones; quantized ones are dequantized to `dtype`.

    Call it after `PackedLinear` has stacked the matrices, so that large ones are written once. Layers are replaced one
    by one, so that each one's first form is freed before the next.
    """
    leaves = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    while leaves:
        name, module = leaves.pop()
        quantized = isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
        if quantized or isinstance(module, nn.Linear | nn.Embedding):
            make = TiledEmbedding if isinstance(module, nn.Embedding | nn.QuantizedEmbedding) else TiledLinear
            tiles = _dequantized_tiles(module, dtype) if quantized else tiled(module.weight)
            mx.eval(tiles)
            model.update_modules(tree_unflatten([(name, make.from_tiles(tiles, module.weight.shape[0]))]))


def _dequantized_tiles(module: nn.QuantizedLinear | nn.QuantizedEmbedding, dtype: mx.Dtype) -> mx.array:
    """The dequantized matrix as tiles `(n, in, 64)`, made in small blocks of rows that are spread over the CPU streams.

    The intermediate steps are three arrays of the result's size; those of a small block stay in the CPU's cache.
    """
    settings = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode, "dtype": dtype}
    packed = [part for part in (module.weight, module.scales, module.biases) if part is not None]
    rows, width = packed[0].shape[0], packed[0].shape[1] * 32 // module.bits
    step = max(1, _BLOCK_BYTES // (width * dtype.size * TILE)) * TILE
    tiles = mx.zeros((-(-rows // TILE), width, TILE), dtype)
    for start in range(0, rows, step * len(cpu_streams())):
        for a, stream in zip(range(start, rows, step), cpu_streams(), strict=False):
            with mx.stream(stream):
                block = tiled(mx.dequantize(*(part[a : a + step] for part in packed), **settings))
            tiles[a // TILE : a // TILE + block.shape[0]] = block
        mx.eval(tiles)
    return tiles
