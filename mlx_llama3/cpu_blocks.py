"""The parts of a block in the form that MLX's CPU backend runs fastest; the same functions as in `model.py`.

There an operation costs microseconds to hand to a stream's thread, whatever its size, and a thread that sleeps costs
tens to wake. A decoded token has a thousand operations: fewer of them, and fewer meetings of the threads, are a third
of its time.
"""

import mlx.core as mx
import mlx.nn as nn

from mlx_llama3.cpu import OCTAVES, TILE, SpreadLinear, joined, shares, streams, times
from mlx_llama3.model import FeedForward, RMSNorm, Transformer
from mlx_llama3.residual import Residual

# Numbers for whose sake two operations more are worth it.
_MANY = 4096


def spread_blocks(model: Transformer) -> None:
    """Put these forms in the place of a model's own where its matrices are `SpreadLinear`."""
    model.norm = BriefNorm(model.norm)
    for layer in model.layers:
        layer.attention_norm, layer.ffn_norm = BriefNorm(layer.attention_norm), BriefNorm(layer.ffn_norm)
        module = layer.feed_forward
        spread = all(isinstance(matrix, SpreadLinear) for matrix in (*module.w13.parts, module.w2))
        if spread and module.w2.tiles.shape[1] % TILE == 0:  # hidden units in whole tiles
            layer.feed_forward = SpreadFeedForward(module)


class BriefNorm(RMSNorm):
    """RMSNorm, for one row in four operations where `mx.fast.rms_norm` takes eight."""

    def __init__(self, whole: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps = whole.weight, whole.eps
        self._eps = mx.array([[whole.eps]])
        mx.eval(self._eps)

    def __call__(self, x: mx.array | Residual) -> mx.array:
        """`(..., dim)` -> `(..., dim)`."""
        if not isinstance(x, mx.array) or x.size != x.shape[-1] or x.ndim < 2 or x.dtype != mx.float32:
            return super().__call__(x)
        mean_square = mx.addmm(self._eps, x, x.swapaxes(-1, -2), alpha=1 / x.size)  # (..., 1, 1), eps added
        return x * mx.rsqrt(mean_square) * self.weight


class SpreadFeedForward(FeedForward):
    """`w2(silu(w1 x) * w3 x)` with its hidden units shared out to the streams, which meet once, to add up."""

    def __init__(self, whole: FeedForward) -> None:
        nn.Module.__init__(self)
        self.fused = False
        self.w13, self.w2 = whole.w13, whole.w2
        self._shares: list[tuple[mx.array, mx.array, mx.array]] = []
        self._of: list[mx.array] = []

    def __call__(self, x: mx.array) -> mx.array:
        """`(..., dim)` -> `(..., dim)`."""
        rows = x.reshape(-1, x.shape[-1])
        updates = []
        for parts, stream in zip(self._parts(), streams(), strict=False):
            with mx.stream(stream):
                updates.append(_update(rows, *parts))
        y = joined(sum(updates[1:], updates[0]))
        return y[:, : x.shape[-1]].reshape(x.shape)

    def _parts(self) -> list[tuple[mx.array, mx.array, mx.array]]:
        """Each stream's hidden units: the tiles of w1 and w3, and their part of each tile of w2; views. Made again when
        another weight was put in their place."""
        tiles = [matrix.tiles for matrix in (*self.w13.parts, self.w2)]
        if not self._of or any(a is not b for a, b in zip(tiles, self._of, strict=True)):
            *w13, w2 = tiles
            w1, w3 = w13 if len(w13) == 2 else mx.split(w13[0], 2)
            self._shares = [(w1[a:b], w3[a:b], w2[:, a * TILE : b * TILE]) for a, b in shares(w1.shape[0])]
            mx.eval(self._shares)
            self._of = tiles
        return self._shares


def _update(x: mx.array, w1: mx.array, w3: mx.array, w2: mx.array) -> mx.array:
    """What one stream's hidden units add: `(count, dim)` -> `(n, count, 64)`, for `joined`."""
    hidden = _silu(times(x, w1)) * times(x, w3)  # (units / 64, count, 64)
    return times(joined(hidden), w2)


def _silu(gate: mx.array) -> mx.array:
    """`gate * sigmoid(gate)`. Of many numbers by a power of two, which is sooner done."""
    return gate * mx.sigmoid(gate) if gate.size < _MANY else gate / (1 + mx.power(2.0, gate * -OCTAVES))
