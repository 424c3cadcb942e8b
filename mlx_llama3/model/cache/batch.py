"""A KV cache for a batch of sequences of unequal length: rows are right-aligned, the shorter ones left-padded.

Each row has the positions that it would have alone, 0 for its first token, and a mask hides the padding. So a row's
result does not depend on the other rows.
"""

from collections.abc import Sequence

from mlx_llama3.model.cache.kv_cache import KVCache

import mlx.core as mx


class Rows:
    """The padding of a batch: number of slots before each row. All layers share one, so that masks are made once."""

    def __init__(self, padding: Sequence[int]) -> None:
        self.padding = list(padding)
        self._latest: tuple[tuple[int, int], mx.array, mx.array] | None = None  # of the last (start, length)

    def positions(self, start: int, length: int) -> mx.array:
        """The position of the token in slot `start`, for each row: int32 `(B,)`; below 0 in the padding."""
        return self._positions_and_mask(start, length)[1]

    def mask(self, start: int, length: int) -> mx.array:
        """Bool `(B, 1, length, start + length)`: the slots that each of the `length` tokens from slot `start` on sees.

        A slot of padding sees itself, because a softmax over no slots would be NaN, which later layers would spread.
        """
        return self._positions_and_mask(start, length)[2]

    def _positions_and_mask(self, start: int, length: int) -> tuple[tuple[int, int], mx.array, mx.array]:
        if self._latest is None or self._latest[0] != (start, length):
            padding = mx.array(self.padding, dtype=mx.int32)
            keys, queries = mx.arange(start + length), mx.arange(start, start + length)[:, None]
            seen = (keys >= padding[:, None, None]) & (keys <= queries)  # (B, length, T)
            seen = (seen | (keys == queries))[:, None]
            self._latest = ((start, length), start - padding, seen)
        return self._latest


class BatchKVCache(KVCache):
    """`KVCache` for a batch of unequal rows; `offset` counts slots, padding included."""

    def __init__(self, rows: Rows, kv: mx.array | None = None) -> None:
        super().__init__()
        self.rows = rows
        self._kv = kv
        self.offset = 0 if kv is None else kv.shape[3]

    def positions(self, length: int) -> mx.array:
        """The position of the first of `length` new tokens in each row, int32 `(B,)`."""
        return self.rows.positions(self.offset, length)

    def attend(self, q: mx.array, kv: mx.array, scale: float, mask: str | mx.array | None) -> mx.array:
        """As `KVCache.attend`, with the mask of the rows instead of `mask`."""
        seen = self.rows.mask(self.offset, kv.shape[3])
        return super().attend(q, kv, scale, seen)

    def keys_and_values(self) -> mx.array:
        """All keys and values so far, `(2, B, n_kv_heads, offset, head_dim)`."""
        return self._kv[:, :, :, : self.offset]


def joined(first: list[BatchKVCache], second: list[BatchKVCache]) -> list[BatchKVCache]:
    """One cache, an entry a layer, with the rows of both; the shorter one gets more padding."""
    length = max(first[0].offset, second[0].offset)
    extra = [length - cache[0].offset for cache in (first, second)]
    rows = Rows([p + more for cache, more in zip((first, second), extra, strict=True) for p in cache[0].rows.padding])

    def padded(layer: BatchKVCache, more: int) -> mx.array:
        kv = layer.keys_and_values()
        return mx.pad(kv, [(0, 0)] * 3 + [(more, 0), (0, 0)]) if more else kv

    return [
        BatchKVCache(rows, mx.concatenate([padded(a, extra[0]), padded(b, extra[1])], axis=1))
        for a, b in zip(first, second, strict=True)
    ]


def selected(layers: list[BatchKVCache], chosen: Sequence[int]) -> list[BatchKVCache]:
    """A cache with the chosen rows only, without the padding that all of these have."""
    padding = [layers[0].rows.padding[row] for row in chosen]
    common = min(padding)
    rows, indices = Rows([p - common for p in padding]), mx.array(list(chosen))
    return [BatchKVCache(rows, layer.keys_and_values()[:, :, :, common:][:, indices]) for layer in layers]
