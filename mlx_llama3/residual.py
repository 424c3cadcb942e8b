"""The residual stream between a branch and the norm after it, where one kernel does both the add and the norm."""

from collections.abc import Callable

import mlx.core as mx

from mlx_llama3.kernels import add_rms_norm

# Told of each add: the new stream and the update `(B, S, dim)`, and their squared norms, float32 `(2, B, S)`.
Watch = Callable[[mx.array, mx.array, mx.array], None]


def plain(stream: "mx.array | Residual") -> mx.array:
    """The stream as an array `(B, S, dim)`."""
    return stream.value if isinstance(stream, Residual) else stream


class Residual:
    """A stream `(B, S, dim)` whose last `+` waits for the norm that reads the sum.

    It stands in a block where an array would: `h = x + attention(...)` makes one, `ffn_norm(h)` adds and norms in one
    kernel, and `h + ...` goes on from the sum. So the block is written once for both.
    """

    def __init__(self, base: mx.array, update: mx.array | None = None, *, watch: Watch | None = None) -> None:
        self._base, self._update, self._watch = base, update, watch

    def __add__(self, update: mx.array) -> "Residual":
        return Residual(self.value, update, watch=self._watch)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(B, S, dim)`."""
        return self._base.shape

    @property
    def value(self) -> mx.array:
        """The stream as an array."""
        if self._update is not None:
            self._base, self._update = self._base + self._update, None
        return self._base

    def normed(self, weight: mx.array, eps: float) -> mx.array:
        """`rms_norm(stream) * weight`, `(B, S, dim)`; the add is done with it."""
        if self._update is None:
            return mx.fast.rms_norm(self._base, weight, eps)
        update, self._update = self._update, None
        self._base, normed, squares = add_rms_norm.fused(self._base, update, weight, eps)
        if self._watch is not None:
            self._watch(self._base, update, squares)
        return normed
