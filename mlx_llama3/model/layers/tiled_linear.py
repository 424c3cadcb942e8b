"""Dense products on MLX's CPU backend, shared out to the cores.

MLX runs each stream of its CPU backend on a thread of its own, so a product by parts of its columns, one part a stream,
uses all cores. A BLAS could do the same with threads of its own, but those wait for each other spinning: as fast on an
idle machine, ten times slower on a busy one.

A decoded token reads every weight once, so the memory sets its time. OpenBLAS reads a matrix at the memory's speed only
where it does not copy it into panels first, in its small kernels (AVX-512), and there fastest as 64 columns that lie
together. So a matrix is kept as tiles of 64 columns: twice as fast for one row of x as rows are, up to five times for a
few. MLX's own reference BLAS gains from them too.
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

# More streams than this only wait for the memory.
_MOST_STREAMS = 8
# Columns of a tile: four registers of 16 numbers.
TILE = 64
# Multiplications of a call up to which the small kernels serve. Rows of x from which calls of fewer than 4 do not pay.
_SMALL_PRODUCT, _FEW_ROWS = 1_000_000, 64
# MLX (0.32) finds the matrices of a batch by a number of 32 bits that counts the repeated ones too, and if it overflows
# reads elsewhere.
_BATCH_INDICES = 1 << 31
# Bytes of a matrix below which one row of x is multiplied sooner than another thread wakes up to help.
_ONE_THREAD_BYTES = 2_500_000
# exp(x) is 2 to the power of x times this. MLX's exp takes 12 ns a number on a CPU, its sigmoid 14, a power of two 5.
LOG2_E = math.log2(math.e)
# Bytes of a matrix that a stream unpacks at a time.
_BLOCK_BYTES = 1 << 22

_own = threading.local()


@cache
def n_cpu_streams() -> int:
    """Cores that this process may use, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_STREAMS)


def cpu_streams() -> list[mx.Stream]:
    """The calling thread's CPU streams, its default one first: MLX's streams belong to the thread that made them."""
    if not hasattr(_own, "streams"):
        _own.streams = [mx.default_stream(mx.cpu), *(mx.new_stream(mx.cpu) for _ in range(n_cpu_streams() - 1))]
    return _own.streams


def split_ranges(size: int) -> list[tuple[int, int]]:
    """Begin and end of each stream's part of `size`."""
    n = min(n_cpu_streams(), size)
    return list(pairwise(size * i // n for i in range(n + 1)))


def tiled(weight: mx.array) -> mx.array:
    """A matrix `(rows, in)` as tiles `(n, in, 64)`, each the transpose of 64 rows; the last is filled with zeros."""
    rows, width = weight.shape
    if rows % TILE:
        weight = mx.pad(weight, [(0, -rows % TILE), (0, 0)])
    return mx.contiguous(weight.reshape(-1, TILE, width).swapaxes(1, 2))


def tiled_matmul(x: mx.array, tiles: mx.array) -> mx.array:
    """`(1, count, in)` with tiles `(n, in, 64)` -> `(n, count, 64)`, which `untiled` puts in order. Both on the current
    stream: what another one did with the product would make this one wait."""
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
    """Into how many groups of how many rows to cut those of x, for the small kernels; one group if they are many and
    only few would go together. The last group may be short."""
    most = max(1, _SMALL_PRODUCT // (TILE * width))
    if count <= most or (count > _FEW_ROWS and most < 4):
        return 1, count
    groups = -(-count // most)
    groups = next((n for n in range(groups, 2 * groups) if count % n == 0), groups)
    return groups, -(-count // groups)


@dataclass(frozen=True)
class TileParts:
    """A matrix's tiles shared out, each stream's a view `of` them; `alone`: one row is multiplied sooner without
    sharing."""

    of: mx.array
    parts: tuple[mx.array, ...]
    alone: bool

    @classmethod
    def of_tiles(cls, tiles: mx.array) -> "TileParts":
        parts = tuple(tiles[a:b] for a, b in split_ranges(tiles.shape[0]))
        mx.eval(parts)  # what is not evaluated could be used in this thread only
        return cls(tiles, parts, tiles.nbytes < _ONE_THREAD_BYTES)


class TiledLinear(nn.Module):
    """As `nn.Linear` without bias, its `weight` `(out, in)` kept as tiles."""

    def __init__(self, weight: mx.array) -> None:
        super().__init__()
        self.weight = weight

    @classmethod
    def of_tiles(cls, tiles: mx.array, rows: int) -> "TiledLinear":
        """Of `(tiles, in, 64)`, without making the matrix; `rows` of it are in use."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(tiles, rows)
        return module

    def __setattr__(self, name: str, value: object) -> None:
        if name == "weight":
            self._take(tiled(value), value.shape[0])
        else:
            super().__setattr__(name, value)

    def _take(self, tiles: mx.array, rows: int) -> None:
        self.tiles, self._rows = tiles, rows
        self._shares: TileParts | None = None

    @property
    def weight(self) -> mx.array:
        """The matrix, put together anew when it is read: not for products."""
        return self.tiles.swapaxes(1, 2).reshape(-1, self.tiles.shape[1])[: self._rows]

    def row(self, index: int) -> mx.array:
        """`(in,)`, without making the matrix."""
        return self.tiles[index // TILE, :, index % TILE]

    def __call__(self, x: mx.array) -> mx.array:
        """`(..., in)` -> `(..., out)`."""
        shape = x.shape
        x = x.reshape(1, -1, shape[-1])
        if self._shares is None or self._shares.of is not self["tiles"]:  # as `nn.Module.update` replaces them
            self._shares = TileParts.of_tiles(self["tiles"])
        if self._shares.alone and x.shape[1] == 1:
            y = untiled(tiled_matmul(x, self["tiles"]))
        else:
            products = []
            for part, stream in zip(self._shares.parts, cpu_streams(), strict=False):
                with mx.stream(stream):
                    products.append(untiled(tiled_matmul(x, part)))
            y = mx.concatenate(products, axis=-1)
        if self._rows % TILE:
            y = y[..., : self._rows]
        return y.reshape(*shape[:-1], self._rows)


class TiledEmbedding(TiledLinear):
    """As `nn.Embedding`, `weight` `(vocab_size, dim)`; the product is that of a tied head."""

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.tiles.swapaxes(1, 2)[tokens // TILE, tokens % TILE]

    def as_linear(self, x: mx.array) -> mx.array:
        """`(..., dim)` -> `(..., vocab_size)`."""
        return super().__call__(x)


def expand(model: nn.Module, dtype: mx.Dtype) -> None:
    """Put such layers in the place of all of `model`'s, quantized ones unpacked to `dtype`.

    After packing, so that large matrices are written once. One by one: each one's first form is freed for the next.
    """
    leaves = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    while leaves:
        name, module = leaves.pop()
        quantized = isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
        if quantized or isinstance(module, nn.Linear | nn.Embedding):
            make = TiledEmbedding if isinstance(module, nn.Embedding | nn.QuantizedEmbedding) else TiledLinear
            tiles = _unpacked(module, dtype) if quantized else tiled(module.weight)
            mx.eval(tiles)
            model.update_modules(tree_unflatten([(name, make.of_tiles(tiles, module.weight.shape[0]))]))


def _unpacked(module: nn.QuantizedLinear | nn.QuantizedEmbedding, dtype: mx.Dtype) -> mx.array:
    """The matrix as tiles, by blocks of rows, which the streams take in turns: the steps between are three arrays of
    the result's size, and by small blocks they stay in the processor's cache."""
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
