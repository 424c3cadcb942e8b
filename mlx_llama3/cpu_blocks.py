"""The parts of a block in the form that MLX's CPU backend runs fastest; the same functions as in `model.py`.

There an operation costs microseconds to hand to a stream's thread, whatever its size, and a thread that sleeps costs
tens to wake. A decoded token has a thousand operations: fewer of them, and fewer meetings of the threads, are a third
of its time.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_llama3.cpu import Part, SpreadLinear, shares, streams
from mlx_llama3.model import FeedForward, RMSNorm, Transformer
from mlx_llama3.residual import Residual


def spread_blocks(model: Transformer) -> None:
    """Put these forms in the place of a model's own where its matrices are `SpreadLinear`."""
    model.norm = BriefNorm(model.norm)
    for layer in model.layers:
        layer.attention_norm, layer.ffn_norm = BriefNorm(layer.attention_norm), BriefNorm(layer.ffn_norm)
        module = layer.feed_forward
        matrices = [*module.w13.parts, module.w2]
        if all(isinstance(matrix, SpreadLinear) for matrix in matrices):
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
        self.w13, self.w2 = whole.w13, SpreadColumns(whole.w2.weight)
        self._matrices: list[tuple[Part, Part]] | None = None
        self._of: list[mx.array] = []

    def __call__(self, x: mx.array) -> mx.array:
        """`(..., dim)` -> `(..., dim)`."""
        updates = []
        for (w1, w3), w2, stream in zip(self._halves(), self.w2.rows(), streams(), strict=False):
            gate, up = w1.times(x, stream), w3.times(x, stream)
            hidden = mx.multiply(mx.multiply(gate, mx.sigmoid(gate, stream=stream), stream=stream), up, stream=stream)
            updates.append(w2.times(hidden, stream))
        return sum(updates[1:], updates[0])

    def _halves(self) -> list[tuple[Part, Part]]:
        """Each stream's rows of w1 and of w3: views. Made again when another weight was put in their place."""
        weights = [part.weight for part in self.w13.parts]
        if self._matrices is None or any(a is not b for a, b in zip(weights, self._of, strict=True)):
            whole = weights[0] if len(weights) == 1 else mx.concatenate(weights)
            hidden = whole.shape[0] // 2
            self._matrices = [(Part(whole[a:b]), Part(whole[hidden + a : hidden + b])) for a, b in shares(hidden)]
            self._of = weights
        return self._matrices


class SpreadColumns(nn.Module):
    """As `nn.Linear` without bias, `(out, in)`, in parts of its columns, one a stream, each in memory of its own."""

    def __init__(self, weight: mx.array) -> None:
        super().__init__()
        self.weight = weight

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # kept as parts alone
            self.parts = [mx.contiguous(value[:, a:b]) for a, b in shares(value.shape[1])]
            mx.eval(self.parts)  # one matrix at a time: MLX would allocate those of all layers before it frees one
            self._rows: list[Part] | None = None
        else:
            super().__setattr__(name, value)

    @property
    def weight(self) -> mx.array:
        """The whole matrix, put together anew: for reading, not for products."""
        return mx.concatenate(self.parts, axis=1)

    def rows(self) -> list[Part]:
        """Each stream's columns, for products with its part of x."""
        if self._rows is None:
            self._rows = [Part(part) for part in self.parts]
        return self._rows

    def __call__(self, x: mx.array) -> mx.array:
        """`(..., in)` -> `(..., out)`."""
        products = [
            part.times(x[..., a:b], stream)
            for part, (a, b), stream in zip(self.rows(), shares(x.shape[-1]), streams(), strict=False)
        ]
        return sum(products[1:], products[0])
