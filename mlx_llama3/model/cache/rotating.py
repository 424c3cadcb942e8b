"""A KV cache of bounded size: the first positions (attention sinks) and a sliding window of the latest ones.

A sliding window alone breaks down once the first few positions leave it (StreamingLLM, Xiao et al. 2023, arXiv
2309.17453). Keys have the RoPE rotation of their position in the text. What a position attends to depends only on that
position, not on the chunks that the prompt was fed in.
"""

from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.layers.attention import scaled_dot_product_attention

import mlx.core as mx


class Window:
    """The attention pattern and the slots of a cache: position p attends to the first `keep` positions and the latest
    `max_size - keep` positions, itself included.

    All layers share one, so that the mask of a pass is made once.
    """

    SLACK = 256  # slots for positions that have left the window, which `trim` brings back

    def __init__(self, max_size: int, keep: int) -> None:
        self.max_size, self.keep = max_size, keep
        self.last = max_size - keep
        self.ring = self.last + self.SLACK
        self.slots = keep + self.ring
        self._latest_mask: tuple[tuple[int, int], mx.array] | None = None  # of the last (start, length)

    def slot(self, positions: mx.array) -> mx.array:
        """The slot of each position: a fixed one for the first `keep`, a ring buffer for the others."""
        return mx.where(positions < self.keep, positions, self.keep + (positions - self.keep) % self.ring)

    def slot_positions(self, end: int) -> mx.array:
        """The position in each slot, `(min(end, slots),)`, after `end` positions were written."""
        slots = mx.arange(min(end, self.slots))
        return mx.where(slots < self.keep, slots, end - 1 - (end - 1 - slots) % self.ring)

    def mask(self, start: int, length: int) -> mx.array:
        """Bool `(length, T)`: the keys that each of the `length` positions from `start` on sees.

        For one new position, the T keys are the slots after it is written. For several, they are the slots before the
        write, then the new positions.
        """
        if self._latest_mask is None or self._latest_mask[0] != (start, length):
            new = mx.arange(start, start + length)
            keys = self.slot_positions(start + 1) if length == 1 else mx.concatenate([self.slot_positions(start), new])
            queries = new[:, None]
            seen = (keys <= queries) & ((keys < self.keep) | (keys > queries - self.last))
            self._latest_mask = ((start, length), seen)
        return self._latest_mask[1]


class RotatingKVCache(KVCache):
    """`KVCache` in which a query sees at most `window.max_size` positions, as `Window` selects them.

    `offset` counts all positions so far. The result is exact: it is that of full attention under the window's mask,
    whatever the chunks. `trim` can drop up to `Window.SLACK` positions, or all after the first `keep`; `trimmable_to`
    gives the possible lengths.
    """

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window
        self._low = window.keep  # the lowest position after the first `keep` that is still in a slot

    @property
    def holds_all(self) -> bool:
        """Whether the cache still has every position so far; `fetch` is then in order."""
        return self._low == self.window.keep

    def attend(self, q: mx.array, kv: mx.array, scale: float, mask: str | mx.array | None) -> mx.array:
        """Append the new positions and attend to those in the window, as `KVCache.attend`.

        `mask` is "causal", or None for a single position; the window's mask is used instead once the window is full.
        """
        start, length = self.offset, kv.shape[3]
        if start + length <= self.window.max_size:
            return super().attend(q, kv, scale, mask)
        if length == 1:
            keys, values = self.update_and_fetch(kv)
        else:  # take the slots before the write: the first new positions still see those that it overwrites
            both = kv if self._kv is None else mx.concatenate([self._used_slots(), kv], axis=3)
            keys, values = both[0, ...], both[1, ...]  # an index alone would copy
            self._write(kv)
        return scaled_dot_product_attention(q, keys, values, scale, self.window.mask(start, length))

    def update_and_fetch(self, kv: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values `(2, B, n_kv_heads, S, head_dim)`; return those in the slots, as `fetch`."""
        self._write(kv)
        return self.fetch()

    def fetch(self) -> tuple[mx.array, mx.array]:
        """Keys and values in the slots, `(B, n_kv_heads, slots, head_dim)` each; in order only while `holds_all`."""
        kv = self._used_slots()
        return kv[0, ...], kv[1, ...]

    def trimmable_to(self, length: int) -> int:
        """As `KVCache.trimmable_to`: beyond the slack, only the first `keep` positions can be restored."""
        length = min(length, self.offset)
        oldest = max(self.window.keep, length - self.window.last + 1)
        return length if oldest >= self._low else min(length, self.window.keep)

    def trim(self, count: int) -> None:
        """Drop the last `count` positions. Raises ValueError for a length that `trimmable_to` does not allow."""
        super().trim(count)
        if self.trimmable_to(self.offset) != self.offset:
            self.offset += count
            raise ValueError(
                f"cannot trim {count} positions: too many of the positions before them have left the window"
            )
        if self.offset <= self.window.keep:
            self._low = self.window.keep

    def tensors(self) -> dict[str, mx.array]:
        """As `KVCache.tensors`, in the order of the slots, with `low`."""
        return {} if self._kv is None else {"kv": self._used_slots(), "low": mx.array([self._low])}

    def restore(self, tensors: dict[str, mx.array], offset: int) -> None:
        """As `KVCache.restore`."""
        super().restore(tensors, offset)
        if tensors:
            self._low = int(tensors["low"].item())

    def _used_slots(self) -> mx.array:
        return self._kv[:, :, :, : min(self.offset, self.window.slots)]

    def _write(self, kv: mx.array) -> None:
        start, end = self.offset, self.offset + kv.shape[3]
        self._reserve(kv, min(end, self.window.slots))
        self._low = max(self._low, end - self.window.ring)  # set before the write, in case Ctrl-C interrupts it
        if end <= self.window.slots:
            self._kv[:, :, :, start:end] = kv
        else:
            n_first = max(0, self.window.keep - start)  # new positions that are among the first `keep`
            last = max(n_first, kv.shape[3] - self.window.ring)  # from here on, new positions stay in the ring
            stored = mx.concatenate([mx.arange(n_first), mx.arange(last, kv.shape[3])])
            self._kv[:, :, :, self.window.slot(start + stored)] = kv[:, :, :, stored]
        self.offset = end
