"""RMSNorm and feed-forward in a form that is fast on MLX's CPU backend; they compute what `model/transformer.py` does.

On that backend, handing an operation to a stream's thread costs microseconds, whatever its size, and waking a sleeping
thread costs tens of them. A decoded token has two thousand operations: fewer operations, and fewer synchronizations of
the threads, save a third of its time.
"""

from dataclasses import dataclass
from operator import is_

from mlx_llama3.model.kernels.kernel_set import Rows
from mlx_llama3.model.layers.tiled_linear import (
    LOG2_E,
    TILE,
    TiledLinear,
    cpu_streams,
    split_ranges,
    tiled_matmul,
    untiled,
)
from mlx_llama3.model.residual import Normed, Residual, plain
from mlx_llama3.model.transformer import FeedForward, RMSNorm, Transformer

import mlx.core as mx
import mlx.nn as nn

# Array size from which silu by a power of two is faster, though it takes two more operations.
_POWER_SIZE = 4096


def use_cpu_blocks(model: Transformer) -> None:
    """Replace a model's norms, and its feed-forwards whose matrices are `TiledLinear`, by the modules of this file."""
    model.norm = SingleTokenRMSNorm(model.norm)
    for layer in model.layers:
        layer.attention_norm, layer.ffn_norm = (
            SingleTokenRMSNorm(layer.attention_norm),
            SingleTokenRMSNorm(layer.ffn_norm),
        )
        module = layer.feed_forward
        tiled = all(isinstance(matrix, TiledLinear) for matrix in (*module.w13.parts, module.w2))
        if tiled and module.w2.tiles.shape[1] % TILE == 0:  # hidden units in whole tiles
            layer.feed_forward = TiledFeedForward(module)


class SingleTokenRMSNorm(RMSNorm):
    """RMSNorm that, for a single position, needs half as many operations as `mx.fast.rms_norm`."""

    def __init__(self, norm: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps, self.reader = norm.weight, norm.eps, norm.reader
        self._eps = mx.array([[[norm.eps]]])
        mx.eval(self._eps)

    def __call__(self, x: mx.array | Residual) -> mx.array | Normed:
        """`(..., dim)` -> `(..., dim)`."""
        if isinstance(x, Residual) and not x.kernels:
            x = x.value
        if not isinstance(x, mx.array) or x.shape[:-1] != (1, 1) or x.dtype != mx.float32:
            return super().__call__(x)
        mean_square = mx.addmm(self["_eps"], x, x.swapaxes(-1, -2), alpha=1 / x.size)  # (1, 1, 1), eps added
        # One matmul instead of two multiplications: MLX would broadcast the smaller operand before each of those.
        return x * (mx.rsqrt(mean_square) @ self["weight"][None, None])


class TiledFeedForward(FeedForward):
    """`w2(silu(w1 x) * w3 x)` with its hidden units split over the CPU streams, which synchronize once, for the sum."""

    def __init__(self, feed_forward: FeedForward) -> None:
        nn.Module.__init__(self)
        self.fused = Rows.NONE
        self.w13, self.w2 = feed_forward.w13, feed_forward.w2
        self._split: _SplitHidden | None = None

    def __call__(self, x: mx.array | Normed) -> mx.array:
        """`(..., dim)` -> `(..., dim)`."""
        x = plain(x)
        shape = x.shape
        x = x.reshape(1, -1, shape[-1])
        updates = []
        for parts, stream in zip(self._parts(), cpu_streams(), strict=False):
            with mx.stream(stream):
                updates.append(_update(x, *parts))
        y = untiled(sum(updates[1:], updates[0]))
        if shape[-1] % TILE:
            y = y[..., : shape[-1]]
        return y.reshape(shape)

    def _parts(self) -> tuple[tuple[mx.array, mx.array, mx.array], ...]:
        """The tiles of each stream's hidden units; split again after a weight was replaced."""
        tiles = [matrix["tiles"] for matrix in (*self["w13"]["parts"], self["w2"])]
        if self._split is None or not all(map(is_, tiles, self._split.tiles)):
            self._split = _SplitHidden.split(tiles)
        return self._split.parts


@dataclass(frozen=True)
class _SplitHidden:
    """The tiles of w1, w3 and w2, with the hidden units split over the CPU streams.

    parts: for each stream, its tiles of w1 and w3, and its columns of each tile of w2; all are views of `tiles`.
    """

    tiles: list[mx.array]
    parts: tuple[tuple[mx.array, mx.array, mx.array], ...]

    @classmethod
    def split(cls, tiles: list[mx.array]) -> "_SplitHidden":
        *w13, w2 = tiles
        w1, w3 = w13 if len(w13) == 2 else mx.split(w13[0], 2)
        parts = tuple((w1[a:b], w3[a:b], w2[:, a * TILE : b * TILE]) for a, b in split_ranges(w1.shape[0]))
        mx.eval(parts)  # a lazy array belongs to this thread's stream; an evaluated one can be used in any thread
        return cls(tiles, parts)


def _update(x: mx.array, w1: mx.array, w3: mx.array, w2: mx.array) -> mx.array:
    """The output of one stream's hidden units: `(1, count, dim)` -> `(tiles of w2, count, 64)`, for `untiled`."""
    hidden = _silu(tiled_matmul(x, w1)) * tiled_matmul(x, w3)  # (units / 64, count, 64)
    return tiled_matmul(untiled(hidden), w2)


def _silu(gate: mx.array) -> mx.array:
    """`gate * sigmoid(gate)`; for large arrays by a power of two, which is faster."""
    return gate * mx.sigmoid(gate) if gate.size < _POWER_SIZE else gate / (1 + mx.power(2.0, gate * -LOG2_E))
