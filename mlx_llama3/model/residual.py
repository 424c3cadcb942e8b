"""A residual stream whose last add is delayed, so that one kernel can do the add, the norm after it, and a product."""

from collections.abc import Callable
from typing import Any

from mlx_llama3.model.kernels import add_rms_norm

import mlx.core as mx

# A callback for each residual add, in order: (update, new stream, squared norms). Update and stream are `(B, S, dim)`.
# The squared L2 norms of both, float32 `(2, B, S)`, come from the fused kernel; None if the add was not fused.
ResidualWatch = Callable[[mx.array, mx.array, mx.array | None], None]


def plain(x: "mx.array | Residual | Normed") -> mx.array:
    """The stream, or its norm, as an array `(B, S, dim)`."""
    return x if isinstance(x, mx.array) else x.value


class Residual:
    """A residual stream `(B, S, dim)` whose last `+` is computed by the norm that reads the sum, and can be watched.

    A block uses it like an array, so its two lines serve both: `h = x + attention(...)` only stores the update,
    `ffn_norm(h)` adds and norms, and `h + ...` continues from the sum. If the kernel of the product that reads the norm
    does both on its way, `ffn_norm(h)` gives it a `Normed`, and the add waits for that product.

    Args:
        base: the stream before the last add.
        update: the last update, not added to `base` yet; None if nothing is pending.
        kernels: the names of the fused kernels that run in this pass.
        watch: called after every add.
    """

    def __init__(
        self,
        base: mx.array,
        update: mx.array | None = None,
        *,
        kernels: frozenset[str] = frozenset(),
        watch: ResidualWatch | None = None,
    ) -> None:
        self._base, self._update, self.kernels, self.watch = base, update, kernels, watch

    def __add__(self, update: mx.array) -> "Residual":
        return self.next(self.value, update)

    def next(self, base: mx.array, update: mx.array | None = None) -> "Residual":
        """The stream `base + update`, with the `kernels` and `watch` of this one."""
        return Residual(base, update, kernels=self.kernels, watch=self.watch)

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

    def waits_for(self, kernel: str | None) -> bool:
        """Whether an add is pending, and `kernel` is in use."""
        return self._update is not None and kernel in self.kernels

    def normed(self, weight: mx.array, eps: float) -> mx.array:
        """`rms_norm(stream) * weight`, `(B, S, dim)`; does the pending add too, by one kernel if that is in use."""
        if self.waits_for("add_rms_norm"):
            return self.added_by(add_rms_norm, weight, eps)
        return mx.fast.rms_norm(self.value, weight, eps)

    def added_by(self, kernel: Any, weight: mx.array, eps: float, *rest: Any) -> Any:
        """Do the pending add by a kernel that goes on to the norm; the rest of what it gives.

        kernel: a file of `kernels` whose `fused` takes stream, update, `weight`, `eps` and `rest`, and gives the new
            stream, the rest, and the squared norms.
        """
        update, self._update = self._update, None
        self._base, rest, squares = kernel.fused(self._base, update, weight, eps, *rest)
        self._notify(update, self._base, squares)
        return rest

    def _add(self) -> None:
        if self._update is not None:
            update, self._update = self._update, None
            self._base = self._base + update
            self._notify(update, self._base, None)

    def _notify(self, update: mx.array, stream: mx.array, squares: mx.array | None) -> None:
        if self.watch is not None:
            self.watch(update, stream, squares)


class Normed:
    """The norm of a residual stream, `rms_norm(stream) * weight`, whose last add and norm wait for their reader."""

    def __init__(self, stream: Residual, weight: mx.array, eps: float) -> None:
        self._stream, self._weight, self._eps = stream, weight, eps

    @property
    def value(self) -> mx.array:
        """The norm as an array `(B, S, dim)`; does the add and the norm."""
        return self._stream.normed(self._weight, self._eps)

    def suits(self, kernel: Any, *rest: Any) -> bool:
        """Whether `kernel` takes stream, update, gains and `rest`."""
        return kernel.takes(*self._stream.parts, self._weight, *rest)

    def read_by(self, kernel: Any, *rest: Any) -> Any:
        """What `kernel` computes of the norm and `rest`; it does the add and the norm on its way."""
        return self._stream.added_by(kernel, self._weight, self._eps, *rest)
