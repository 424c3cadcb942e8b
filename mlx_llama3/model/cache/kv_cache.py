"""The KV cache of a layer: the keys (after RoPE) and values of all positions so far."""

import copy
from typing import Self

from mlx_llama3.model.layers.attention import scaled_dot_product_attention

import mlx.core as mx

# More positions than any pass appends.
UNLIMITED = 1 << 30


class KVCache:
    """Keys and values of one layer, in a buffer that grows by `STEP` positions and is written in place.

    Growing by concatenation would copy the whole cache for every token. Here a token is one slice update, for keys and
    values together.
    """

    STEP = 256

    def __init__(self) -> None:
        self.offset = 0
        self._kv: mx.array | None = None  # (2, B, n_kv_heads, capacity, head_dim)

    def attend(self, q: mx.array, kv: mx.array, scale: float, mask: str | mx.array | None) -> mx.array:
        """Append the new positions and attend to all positions so far.

        Args:
            q: rotated queries of the new positions, `(B, n_heads, S, head_dim)`.
            kv: rotated keys, and values, of the new positions, `(2, B, n_kv_heads, S, head_dim)`.
            scale: factor of the scores, `head_dim ** -0.5`.
            mask: "causal", None, or an array as `mx.fast.scaled_dot_product_attention` takes it.

        Returns:
            `(B, n_heads, S, head_dim)`.
        """
        keys, values = self.update_and_fetch(kv)
        return scaled_dot_product_attention(q, keys, values, scale, mask)

    def update_and_fetch(self, kv: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values `(2, B, n_kv_heads, S, head_dim)`; return all so far, as `fetch`."""
        start, end = self.offset, self.offset + kv.shape[3]
        self._reserve(kv, end)
        self._kv[:, :, :, start:end] = kv
        self.offset = end
        return self.fetch()

    def fetch(self) -> tuple[mx.array, mx.array]:
        """All keys and values so far, `(B, n_kv_heads, offset, head_dim)` each."""
        # With slices beside the index these are views; an index alone would gather, which copies.
        return self._kv[0, :, :, : self.offset], self._kv[1, :, :, : self.offset]

    def _reserve(self, kv: mx.array, end: int) -> None:
        capacity = 0 if self._kv is None else self._kv.shape[3]
        if end <= capacity:
            return
        grown = -(-end // self.STEP) * self.STEP
        if self._kv is None:
            self._kv = mx.zeros((*kv.shape[:3], grown, kv.shape[4]), kv.dtype)
        else:
            self._kv = mx.pad(self._kv[:, :, :, : self.offset], [(0, 0)] * 3 + [(0, grown - self.offset), (0, 0)])

    def trim(self, count: int) -> None:
        """Drop the last `count` positions. Raises ValueError if there are fewer."""
        if not 0 <= count <= self.offset:
            raise ValueError(f"cannot trim {count} positions of a cache that holds {self.offset}")
        self.offset -= count

    def positions(self, length: int) -> int | mx.array:
        """The position of the first of `length` new tokens; an array `(B,)` if each row of a batch has its own."""
        return self.offset

    @property
    def max_draft(self) -> int:
        """Most positions that one pass may append with the same result as one at a time."""
        return UNLIMITED

    @property
    def holds_all(self) -> bool:
        """Whether the cache still has every position so far; one with a window drops some."""
        return True

    def trimmable_to(self, length: int) -> int:
        """The largest number of positions, at most `length`, that `trim` can shorten the cache to."""
        return min(length, self.offset)

    def tensors(self) -> dict[str, mx.array]:
        """The positions in use, as named tensors for a file; {} if the cache is empty."""
        return {} if self._kv is None else {"kv": self._kv[:, :, :, : self.offset]}

    def restore(self, tensors: dict[str, mx.array], offset: int) -> None:
        """Fill an empty cache with the `tensors()` of one that had `offset` positions. They may be lazy."""
        self._kv, self.offset = tensors.get("kv"), offset

    def prefix(self, count: int) -> Self:
        """A cache with the first `count` positions, which can be extended without changing this one.

        The two share their buffers until one of them is written to; that write copies.
        """
        copied = copy.copy(self)
        if self._kv is not None:
            copied._kv = self._kv[...]  # a new array over the same buffer: a write to one does not show in the other
        copied.trim(self.offset - count)
        return copied

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for `mx.eval`; [] before the first update."""
        return [] if self._kv is None else [self._kv]


def check_start(cache: list[KVCache] | None, start_pos: int, n_layers: int) -> None:
    """Raise ValueError unless every layer's cache has exactly `start_pos` positions.

    A call that forgot `start_pos` would apply RoPE from position 0 on and return plausible but wrong logits.
    """
    if cache is None:
        if start_pos != 0:
            raise ValueError(
                f"start_pos is {start_pos} but there is no cache that holds the {start_pos} positions before"
            )
        return
    if len(cache) != n_layers:
        raise ValueError(f"the cache is for {len(cache)} layers, the model has {n_layers}")
    for layer, entry in enumerate(cache):
        if entry.offset != start_pos:
            raise ValueError(f"start_pos is {start_pos} but the cache of layer {layer} holds {entry.offset} positions")
