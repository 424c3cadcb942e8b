"""The parts of a block in the form that MLX's CPU backend runs fastest; the same functions as in `model.py`.

There an operation costs microseconds to hand to a stream's thread, whatever its size, and a thread that sleeps costs
tens to wake. A decoded token has two thousand operations: fewer of them, and fewer meetings of the threads, are a third
of its time.
"""

from dataclasses import dataclass
from operator import is_

from mlx_llama3.model.layers.tiled_linear import (
    LOG2_E,
    TILE,
    TiledLinear,
    cpu_streams,
    split_ranges,
    tiled_matmul,
    untiled,
)
from mlx_llama3.model.residual import Residual
from mlx_llama3.model.transformer import FeedForward, RMSNorm, Transformer

import mlx.core as mx
import mlx.nn as nn

# Numbers for whose sake two operations more are worth it.
_MANY = 4096


def use_cpu_blocks(model: Transformer) -> None:
    """Put these forms in the place of a model's own where its matrices are `TiledLinear`."""
    model.norm = SingleTokenRMSNorm(model.norm)
    for layer in model.layers:
        layer.attention_norm, layer.ffn_norm = (
            SingleTokenRMSNorm(layer.attention_norm),
            SingleTokenRMSNorm(layer.ffn_norm),
        )
        module = layer.feed_forward
        spread = all(isinstance(matrix, TiledLinear) for matrix in (*module.w13.parts, module.w2))
        if spread and module.w2.tiles.shape[1] % TILE == 0:  # hidden units in whole tiles
            layer.feed_forward = TiledFeedForward(module)


class SingleTokenRMSNorm(RMSNorm):
    """RMSNorm, for one position in half of the operations that `mx.fast.rms_norm` takes."""

    def __init__(self, whole: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps = whole.weight, whole.eps
        self._eps = mx.array([[[whole.eps]]])
        mx.eval(self._eps)

    def __call__(self, x: mx.array | Residual) -> mx.array:
        """`(..., dim)` -> `(..., dim)`."""
        if isinstance(x, Residual) and not x.fused:
            x = x.value
        if not isinstance(x, mx.array) or x.shape[:-1] != (1, 1) or x.dtype != mx.float32:
            return super().__call__(x)
        mean_square = mx.addmm(self["_eps"], x, x.swapaxes(-1, -2), alpha=1 / x.size)  # (1, 1, 1), eps added
        # By a product and not by two multiplications, before each of which an operation would repeat the smaller side.
        return x * (mx.rsqrt(mean_square) @ self["weight"][None, None])


class TiledFeedForward(FeedForward):
    """`w2(silu(w1 x) * w3 x)` with its hidden units shared out to the streams, which meet once, to add up."""

    def __init__(self, whole: FeedForward) -> None:
        nn.Module.__init__(self)
        self.fused = False
        self.w13, self.w2 = whole.w13, whole.w2
        self._hidden: _Hidden | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """`(..., dim)` -> `(..., dim)`."""
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
        """Each stream's hidden units; made again when another weight was put in their place."""
        tiles = [matrix["tiles"] for matrix in (*self["w13"]["parts"], self["w2"])]
        if self._hidden is None or not all(map(is_, tiles, self._hidden.of)):
            self._hidden = _Hidden.shared_out(tiles)
        return self._hidden.parts


@dataclass(frozen=True)
class _Hidden:
    """Each stream's part of the hidden units: of the tiles of w1 and w3, and of each tile of w2; views `of` these."""

    of: list[mx.array]
    parts: tuple[tuple[mx.array, mx.array, mx.array], ...]

    @classmethod
    def shared_out(cls, tiles: list[mx.array]) -> "_Hidden":
        *w13, w2 = tiles
        w1, w3 = w13 if len(w13) == 2 else mx.split(w13[0], 2)
        parts = tuple((w1[a:b], w3[a:b], w2[:, a * TILE : b * TILE]) for a, b in split_ranges(w1.shape[0]))
        mx.eval(parts)  # what is not evaluated could be used in this thread only
        return cls(tiles, parts)


def _update(x: mx.array, w1: mx.array, w3: mx.array, w2: mx.array) -> mx.array:
    """What one stream's hidden units add: `(1, count, dim)` -> `(n, count, 64)`, for `untiled`."""
    hidden = _silu(tiled_matmul(x, w1)) * tiled_matmul(x, w3)  # (units / 64, count, 64)
    return tiled_matmul(untiled(hidden), w2)


def _silu(gate: mx.array) -> mx.array:
    """`gate * sigmoid(gate)`. Of many numbers by a power of two, which is sooner done."""
    return gate * mx.sigmoid(gate) if gate.size < _MANY else gate / (1 + mx.power(2.0, gate * -LOG2_E))
