"""The residual stream between a branch and the norm after it, where one kernel does both the add and the norm."""

from collections.abc import Callable

from mlx_llama3.model.kernels import add_rms_norm

import mlx.core as mx

# Told of each add, in their order: the update and the new stream `(B, S, dim)`, and, where the kernel has found them on
# its way, the squared norms of both, float32 `(2, B, S)`.
ResidualWatch = Callable[[mx.array, mx.array, mx.array | None], None]


def plain(stream: "mx.array | Residual") -> mx.array:
    """The stream as an array `(B, S, dim)`."""
    return stream.value if isinstance(stream, Residual) else stream


class Residual:
    """A stream `(B, S, dim)` whose last `+` waits for the norm that reads the sum, and which can be watched.

    It stands in a block where an array would: `h = x + attention(...)` makes one, `ffn_norm(h)` adds and norms, and
    `h + ...` goes on from the sum. So the block is written once.

    Args:
        base: the stream, to which `update`, if there is one, is still to be added.
        fused: add and norm in one kernel.
        watch: is told of every add, when it is done.
    """

    def __init__(
        self, base: mx.array, update: mx.array | None = None, *, fused: bool = False, watch: ResidualWatch | None = None
    ) -> None:
        self._base, self._update, self.fused, self.watch = base, update, fused, watch

    def __add__(self, update: mx.array) -> "Residual":
        return self.next(self.value, update)

    def next(self, base: mx.array, update: mx.array | None = None) -> "Residual":
        """The stream `base + update`, treated as this one."""
        return Residual(base, update, fused=self.fused, watch=self.watch)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(B, S, dim)`."""
        return self._base.shape

    @property
    def value(self) -> mx.array:
        """The stream as an array."""
        self._add()
        return self._base

    @property
    def parts(self) -> list[mx.array]:
        """The base, and the update that waits, if one does."""
        return [self._base] if self._update is None else [self._base, self._update]

    def changed(self, change: Callable[[mx.array], mx.array]) -> "Residual":
        """The stream with `change(array)` in its place: what is watched of the last add is the changed one."""
        base, update = self._base, self._update
        if update is None:
            return self.next(change(base))
        self._base, self._update = base + update, None
        changed = change(self._base)
        self._tell(update, changed, None)
        return self.next(changed)

    def normed(self, weight: mx.array, eps: float) -> mx.array:
        """`rms_norm(stream) * weight`, `(B, S, dim)`; an add that waits is done with it."""
        if self._update is None or not self.fused:
            return mx.fast.rms_norm(self.value, weight, eps)
        update, self._update = self._update, None
        self._base, normed, squares = add_rms_norm.fused(self._base, update, weight, eps)
        self._tell(update, self._base, squares)
        return normed

    def _add(self) -> None:
        if self._update is not None:
            update, self._update = self._update, None
            self._base = self._base + update
            self._tell(update, self._base, None)

    def _tell(self, update: mx.array, stream: mx.array, squares: mx.array | None) -> None:
        if self.watch is not None:
            self.watch(update, stream, squares)
