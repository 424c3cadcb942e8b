"""A residual stream whose last add is delayed, so that one kernel can do the add and the norm that follows it."""

from collections.abc import Callable

from mlx_llama3.model.kernels import add_rms_norm

import mlx.core as mx

# A callback for each residual add, in order: (update, new stream, squared norms). Update and stream are `(B, S, dim)`.
# The squared L2 norms of both, float32 `(2, B, S)`, come from the fused kernel; None if the add was not fused.
ResidualWatch = Callable[[mx.array, mx.array, mx.array | None], None]


def plain(stream: "mx.array | Residual") -> mx.array:
    """The stream as an array `(B, S, dim)`."""
    return stream.value if isinstance(stream, Residual) else stream


class Residual:
    """A residual stream `(B, S, dim)` whose last `+` is computed by the norm that reads the sum, and can be watched.

    A block uses it like an array, so its two lines serve both: `h = x + attention(...)` only stores the update,
    `ffn_norm(h)` adds and norms, and `h + ...` continues from the sum.

    Args:
        base: the stream before the last add.
        update: the last update, not added to `base` yet; None if nothing is pending.
        fused: add and norm in one kernel.
        watch: called after every add.
    """

    def __init__(
        self, base: mx.array, update: mx.array | None = None, *, fused: bool = False, watch: ResidualWatch | None = None
    ) -> None:
        self._base, self._update, self.fused, self.watch = base, update, fused, watch

    def __add__(self, update: mx.array) -> "Residual":
        return self.next(self.value, update)

    def next(self, base: mx.array, update: mx.array | None = None) -> "Residual":
        """The stream `base + update`, with the `fused` and `watch` of this one."""
        return Residual(base, update, fused=self.fused, watch=self.watch)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(B, S, dim)`."""
        return self._base.shape

    @property
    def value(self) -> mx.array:
        """The stream as an array `(B, S, dim)`; does the pending add."""
        self._add()
        return self._base

    @property
    def parts(self) -> list[mx.array]:
        """The base, and the pending update if there is one; the arguments that rebuild this stream."""
        return [self._base] if self._update is None else [self._base, self._update]

    def changed(self, change: Callable[[mx.array], mx.array]) -> "Residual":
        """The stream after `change(array)`. If an add was pending, `watch` gets the changed stream."""
        base, update = self._base, self._update
        if update is None:
            return self.next(change(base))
        self._base, self._update = base + update, None
        changed = change(self._base)
        self._notify(update, changed, None)
        return self.next(changed)

    def normed(self, weight: mx.array, eps: float) -> mx.array:
        """`rms_norm(stream) * weight`, `(B, S, dim)`; does the pending add too, in the same kernel if `fused`."""
        if self._update is None or not self.fused:
            return mx.fast.rms_norm(self.value, weight, eps)
        update, self._update = self._update, None
        self._base, normed, squares = add_rms_norm.fused(self._base, update, weight, eps)
        self._notify(update, self._base, squares)
        return normed

    def _add(self) -> None:
        if self._update is not None:
            update, self._update = self._update, None
            self._base = self._base + update
            self._notify(update, self._base, None)

    def _notify(self, update: mx.array, stream: mx.array, squares: mx.array | None) -> None:
        if self.watch is not None:
            self.watch(update, stream, squares)
