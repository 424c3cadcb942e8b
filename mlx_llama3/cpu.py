"""Dense products on MLX's CPU backend, shared out to the cores.

MLX runs each stream of its CPU backend on a thread of its own, so a product by blocks of rows, one block a stream, uses
all cores. A BLAS could do the same with threads of its own, but those wait for each other spinning: as fast on an idle
machine, ten times slower on a busy one.
"""

import os
import threading
from functools import cache
from itertools import cycle, pairwise

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

# More streams than this only wait for the memory.
_MOST = 8
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


class _Rows:
    """A matrix in equal blocks of rows, one a stream: transposed views `(in, rows)` that share its memory."""

    def __init__(self, weight: mx.array) -> None:
        rows, n = weight.shape[0], min(n_streams(), weight.shape[0])
        bounds = [rows * i // n for i in range(n + 1)]
        self.weight = weight
        self.blocks = [weight[a:b].T for a, b in pairwise(bounds)]
        mx.eval(self.blocks)  # what is not evaluated could be used in this thread only

    def product(self, x: mx.array) -> mx.array:
        """`(..., in)` -> `(..., out)`."""
        parts = [mx.matmul(x, block, stream=stream) for block, stream in zip(self.blocks, streams(), strict=False)]
        return mx.concatenate(parts, axis=-1)


class SpreadLinear(nn.Module):
    """As `nn.Linear` without bias: `weight` `(out, in)`."""

    def __init__(self, weight: mx.array) -> None:
        super().__init__()
        self.weight = weight
        self._rows: _Rows | None = None

    def __call__(self, x: mx.array) -> mx.array:
        # At the first use, when the weight is evaluated, and again when another one was put in its place.
        if self._rows is None or self._rows.weight is not self.weight:
            self._rows = _Rows(self.weight)
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

    After packing, so that large matrices are written once.
    """
    turns = cycle(streams())  # two unpack the demo model in 0.2 s, one in 0.35 s

    def layer(module: nn.Module) -> nn.Module:
        if not isinstance(module, nn.Linear | nn.QuantizedLinear | nn.Embedding | nn.QuantizedEmbedding):
            return module
        weight = module.weight
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            settings = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
            weight = mx.dequantize(weight, module.scales, module.biases, **settings, dtype=dtype, stream=next(turns))
        make = SpreadEmbedding if isinstance(module, nn.Embedding | nn.QuantizedEmbedding) else SpreadLinear
        return make(weight)

    model.update_modules(tree_map(layer, model.leaf_modules(), is_leaf=nn.Module.is_module))
