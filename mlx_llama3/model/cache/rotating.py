"""A cache of bounded size: the first positions, which soak up attention, and a window of the last ones.

Keeping the first few is what holds a window together (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453). Positions keep
the rotation of where they stand in the text, and what a position sees depends on that place alone, not on how the
prompt was cut into chunks.
"""

from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.layers.attention import scaled_dot_product_attention

import mlx.core as mx


class Window:
    """Who sees whom: a position p sees itself, the `keep` first positions, and so many before it that they are
    `max_size` together.

    Shared by all layers, which ask for the same mask in one pass.
    """

    SLACK = 256  # slots for positions that have left the window, so that `trim` can bring them back

    def __init__(self, max_size: int, keep: int) -> None:
        self.max_size, self.keep = max_size, keep
        self.last = max_size - keep
        self.ring = self.last + self.SLACK
        self.slots = keep + self.ring
        self._made: tuple[tuple[int, int], mx.array] | None = None

    def slot(self, positions: mx.array) -> mx.array:
        """Where positions are kept: the first ones for good, the others in turn."""
        return mx.where(positions < self.keep, positions, self.keep + (positions - self.keep) % self.ring)

    def held(self, end: int) -> mx.array:
        """The position in each slot `(min(end, slots),)` when `end` positions were written."""
        slots = mx.arange(min(end, self.slots))
        return mx.where(slots < self.keep, slots, end - 1 - (end - 1 - slots) % self.ring)

    def mask(self, start: int, length: int) -> mx.array:
        """Bool `(length, T)`: what the positions from `start` on see.

        Of one new position, T are the slots once it is written; of several, the slots before, then the new ones.
        """
        if self._made is None or self._made[0] != (start, length):
            new = mx.arange(start, start + length)
            keys = self.held(start + 1) if length == 1 else mx.concatenate([self.held(start), new])
            queries = new[:, None]
            seen = (keys <= queries) & ((keys < self.keep) | (keys > queries - self.last))
            self._made = ((start, length), seen)
        return self._made[1]


class RotatingKVCache(KVCache):
    """As `KVCache`, but for the `window.max_size` positions that a `Window` lets a query see.

    `offset` counts all positions so far. Exact: a pass gives what full attention with the window's mask gives, whatever
    the chunks. `trim` goes back by up to `Window.SLACK` positions, or to the kept ones; `trimmable_to` tells.
    """

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window
        self._low = window.keep  # of the positions past the kept ones, the first that is still there

    @property
    def holds_all(self) -> bool:
        """Whether every position so far is held, so that `fetch` is in their order."""
        return self._low == self.window.keep

    def attend(self, q: mx.array, kv: mx.array, scale: float, mask: str | mx.array | None) -> mx.array:
        """Append the new positions and attend to those in the window; as `KVCache.attend`.

        mask: "causal", or None for a single position; the window's own takes its place.
        """
        start, length = self.offset, kv.shape[3]
        if start + length <= self.window.max_size:
            return super().attend(q, kv, scale, mask)
        if length == 1:
            keys, values = self.update_and_fetch(kv)
        else:  # attend before the oldest positions are written over, which the first of the new ones still see
            held = kv if self._kv is None else mx.concatenate([self._held(), kv], axis=3)
            keys, values = held[0, ...], held[1, ...]  # an index alone would copy
            self._write(kv)
        seen = self.window.mask(start, length)
        return scaled_dot_product_attention(q, keys, values, scale, seen)

    def update_and_fetch(self, kv: mx.array) -> tuple[mx.array, mx.array]:
        """Append `(2, B, n_kv_heads, S, head_dim)`; return what is held, as `fetch` does."""
        self._write(kv)
        return self.fetch()

    def fetch(self) -> tuple[mx.array, mx.array]:
        """Keys and values that are held, `(B, n_kv_heads, slots, head_dim)` each; in order only while `holds_all`."""
        held = self._held()
        return held[0, ...], held[1, ...]

    def trimmable_to(self, length: int) -> int:
        """As `KVCache.trimmable_to`: past the slack only the kept positions can be gone back to."""
        length = min(length, self.offset)
        oldest = max(self.window.keep, length - self.window.last + 1)
        return length if oldest >= self._low else min(length, self.window.keep)

    def trim(self, count: int) -> None:
        """Forget the last `count` positions. Raises ValueError where `trimmable_to` does not go so far back."""
        super().trim(count)
        if self.trimmable_to(self.offset) != self.offset:
            self.offset += count
            raise ValueError(f"cannot trim {count} positions: of those before them too many have left the window")
        if self.offset <= self.window.keep:
            self._low = self.window.keep

    def tensors(self) -> dict[str, mx.array]:
        """As `KVCache.tensors`; the slots as they are."""
        return {} if self._kv is None else {"kv": self._held(), "low": mx.array([self._low])}

    def restore(self, tensors: dict[str, mx.array], offset: int) -> None:
        """As `KVCache.restore`."""
        super().restore(tensors, offset)
        if tensors:
            self._low = int(tensors["low"].item())

    def _held(self) -> mx.array:
        return self._kv[:, :, :, : min(self.offset, self.window.slots)]

    def _write(self, kv: mx.array) -> None:
        start, end = self.offset, self.offset + kv.shape[3]
        self._reserve(kv, min(end, self.window.slots))
        self._low = max(self._low, end - self.window.ring)  # first: Ctrl-C may leave them written over
        if end <= self.window.slots:
            self._kv[:, :, :, start:end] = kv
        else:
            kept = max(0, self.window.keep - start)  # of the new positions, the first that are kept for good
            last = max(kept, kv.shape[3] - self.window.ring)  # and where those begin that have a slot at the end
            chosen = mx.concatenate([mx.arange(kept), mx.arange(last, kv.shape[3])])
            self._kv[:, :, :, self.window.slot(start + chosen)] = kv[:, :, :, chosen]
        self.offset = end
