"""Dense products on MLX's CPU backend, shared out to the cores.

MLX runs each stream of its CPU backend on a thread of its own, so a product by parts of its rows, one part a stream,
uses all cores. A BLAS could do the same with threads of its own, but those wait for each other spinning: as fast on an
idle machine, ten times slower on a busy one.
"""

import os
import threading
from functools import cache
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

# More streams than this only wait for the memory.
_MOST = 8
# OpenBLAS copies a matrix into panels before it multiplies, which for a single row of x costs more than the product.
# Its small kernels (AVX-512) read the matrix as it lies, at three times the speed, up to 10^6 multiplications a call
# and 1200 rows; where a processor has none, blocks of that size cost nothing.
_SMALL = 990_000
_MOST_ROWS = 1100
# Rows of x up to which that pays, and how many times smaller than they could be blocks may get to divide the matrix.
_FEW = 8
_TOO_SMALL = 8
# Bytes of a matrix below which one row of x is multiplied sooner than another thread wakes up to help.
_ALONE = 2_500_000
# Bytes of a matrix that a stream unpacks at a time.
_BLOCK = 1 << 22

_own = threading.local()


@cache
def n_streams() -> int:
    """Cores that this process may use, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST)


def streams() -> list[mx.Stream]:
    """The calling thread's CPU streams, its default one first: MLX's streams belong to the thread that made them."""
    if not hasattr(_own, "streams"):
        _own.streams = [mx.default_stream(mx.cpu), *(mx.new_stream(mx.cpu) for _ in range(n_streams() - 1))]
    return _own.streams


def shares(size: int) -> list[tuple[int, int]]:
    """Begin and end of each stream's part of `size`."""
    n = min(n_streams(), size)
    return list(pairwise(size * i // n for i in range(n + 1)))


class Part:
    """Some rows of a matrix, `(rows, in)`, in views that share its memory; a product of theirs is one stream's work."""

    def __init__(self, weight: mx.array) -> None:
        self.weight = weight
        self._whole = weight.T  # (in, rows)
        self._blocks: dict[int, mx.array | None] = {}
        mx.eval(weight, self._whole)  # what is not evaluated could be used in this thread only

    def times(self, x: mx.array, stream: mx.Stream) -> mx.array:
        """`(..., in)` -> `(..., rows)`."""
        *lead, width = x.shape
        count = x.size // width
        blocks = self._for_few(count) if count <= _FEW else None
        if blocks is None:
            return mx.matmul(x, self._whole, stream=stream)
        # All of it on this stream: what another one did with the product would make that one wait.
        x = mx.reshape(x, (1, count, width), stream=stream)
        product = mx.matmul(x, blocks, stream=stream)  # (blocks, count, rows)
        if count > 1:
            product = mx.swapaxes(product, 0, 1, stream=stream)
        return mx.reshape(product, (*lead, -1), stream=stream)

    def _for_few(self, count: int) -> mx.array | None:
        """The rows as `(blocks, in, rows)`, small enough for `count` rows of x; None if they are small enough as they
        are, or no such size divides them."""
        if count not in self._blocks:
            rows, width = self.weight.shape
            most = min(_SMALL // (count * width), _MOST_ROWS, rows)
            size = next((size for size in range(most, 0, -1) if rows % size == 0), 0)
            blocks = None
            if size < rows and size * _TOO_SMALL >= most > 0:
                blocks = self.weight.reshape(-1, size, width).swapaxes(1, 2)
                mx.eval(blocks)
            self._blocks[count] = blocks
        return self._blocks[count]


class Rows:
    """A matrix `(out, in)` in equal parts of its rows, one a stream."""

    def __init__(self, weight: mx.array) -> None:
        self.weight = weight
        self.parts = [Part(weight[a:b]) for a, b in shares(weight.shape[0])]
        self._alone = Part(weight) if weight.nbytes < _ALONE else None

    def product(self, x: mx.array) -> mx.array:
        """`(..., in)` -> `(..., out)`."""
        if self._alone is not None and x.size == x.shape[-1]:
            return self._alone.times(x, streams()[0])
        return mx.concatenate(
            [part.times(x, stream) for part, stream in zip(self.parts, streams(), strict=False)], axis=-1
        )


class SpreadLinear(nn.Module):
    """As `nn.Linear` without bias: `weight` `(out, in)`."""

    def __init__(self, weight: mx.array) -> None:
        super().__init__()
        self.weight = weight
        self._rows: Rows | None = None

    def __call__(self, x: mx.array) -> mx.array:
        # At the first use, when the weight is evaluated, and again when another one was put in its place.
        if self._rows is None or self._rows.weight is not self.weight:
            self._rows = Rows(self.weight)
        return self._rows.product(x)


class SpreadEmbedding(SpreadLinear):
    """As `nn.Embedding`, `weight` `(vocab_size, dim)`; the product is that of a tied head."""

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.weight[tokens]

    def as_linear(self, x: mx.array) -> mx.array:
        """`(..., dim)` -> `(..., vocab_size)`."""
        return super().__call__(x)


def expand(model: nn.Module, dtype: mx.Dtype) -> None:
    """Put such layers in the place of all of `model`'s: quantized ones unpacked to `dtype`, dense ones shared.

    After packing, so that large matrices are written once. One by one, each packed matrix is freed for the next.
    """
    leaves = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    while leaves:
        name, module = leaves.pop()
        quantized = isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
        if quantized or isinstance(module, nn.Linear | nn.Embedding):
            make = SpreadEmbedding if isinstance(module, nn.Embedding | nn.QuantizedEmbedding) else SpreadLinear
            weight = _unpacked(module, dtype) if quantized else module.weight
            model.update_modules(tree_unflatten([(name, make(weight))]))


def _unpacked(module: nn.QuantizedLinear | nn.QuantizedEmbedding, dtype: mx.Dtype) -> mx.array:
    """The matrix `(out, in)` by blocks of rows, which the streams take in turns: the steps between are three arrays of
    the result's size, and by small blocks they stay in the processor's cache."""
    settings = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode, "dtype": dtype}
    packed = [part for part in (module.weight, module.scales, module.biases) if part is not None]
    rows, width = packed[0].shape[0], packed[0].shape[1] * 32 // module.bits
    step = max(1, _BLOCK // (width * dtype.size))
    weight = mx.zeros((rows, width), dtype)
    for start in range(0, rows, step * len(streams())):
        for a, stream in zip(range(start, rows, step), streams(), strict=False):
            block = mx.dequantize(*(part[a : a + step] for part in packed), **settings, stream=stream)
            weight[a : a + step] = block
        mx.eval(weight)
    return weight
