"""A cache for several sequences at once: rows of unequal length, right-aligned, with padding before the shorter ones.

Each row keeps the positions that it would have alone, 0 for its first token, so what it computes does not depend on
which rows stand beside it. The padding is hidden from it by a mask.
"""

from collections.abc import Sequence

from mlx_llama3.model.cache.kv_cache import KVCache

import mlx.core as mx


class Rows:
    """How many slots of `padding` stand before each row `(B)`. Shared by all layers, which ask for the same masks."""

    def __init__(self, padding: Sequence[int]) -> None:
        self.padding = list(padding)
        self._made: tuple[tuple[int, int], mx.array, mx.array] | None = None

    def positions(self, start: int, length: int) -> mx.array:
        """Of the token in slot `start`, in each row: int32 `(B,)`; below 0 in the padding."""
        return self._both(start, length)[1]

    def mask(self, start: int, length: int) -> mx.array:
        """Bool `(B, 1, length, start + length)`: which slots the tokens from slot `start` on see.

        A slot of padding sees itself, since a softmax over nothing would be NaN and spread.
        """
        return self._both(start, length)[2]

    def _both(self, start: int, length: int) -> tuple[tuple[int, int], mx.array, mx.array]:
        if self._made is None or self._made[0] != (start, length):
            padding = mx.array(self.padding, dtype=mx.int32)
            keys, queries = mx.arange(start + length), mx.arange(start, start + length)[:, None]
            seen = (keys >= padding[:, None, None]) & (keys <= queries)  # (B, length, T)
            seen = (seen | (keys == queries))[:, None]
            self._made = ((start, length), start - padding, seen)
        return self._made


class BatchKVCache(KVCache):
    """As `KVCache`, of several rows; `offset` counts slots, padding included."""

    def __init__(self, rows: Rows, kv: mx.array | None = None) -> None:
        super().__init__()
        self.rows = rows
        self._kv = kv
        self.offset = 0 if kv is None else kv.shape[3]

    def positions(self, length: int) -> mx.array:
        """As `KVCache.positions`, one for each row: `(B,)`."""
        return self.rows.positions(self.offset, length)

    def attend(self, q: mx.array, kv: mx.array, scale: float, mask: str | mx.array | None) -> mx.array:
        """As `KVCache.attend`; the mask of the rows takes the place of `mask`."""
        seen = self.rows.mask(self.offset, kv.shape[3])
        return super().attend(q, kv, scale, seen)

    def held(self) -> mx.array:
        """Keys and values `(2, B, n_kv_heads, offset, head_dim)`."""
        return self._kv[:, :, :, : self.offset]


def joined(first: list[BatchKVCache], second: list[BatchKVCache]) -> list[BatchKVCache]:
    """One cache, a layer each, of the rows of both; the shorter ones get more padding."""
    length = max(first[0].offset, second[0].offset)
    more = [length - each[0].offset for each in (first, second)]
    padding = [p + extra for each, extra in zip((first, second), more, strict=True) for p in each[0].rows.padding]
    rows = Rows(padding)

    def widened(layer: BatchKVCache, extra: int) -> mx.array:
        return mx.pad(layer.held(), [(0, 0)] * 3 + [(extra, 0), (0, 0)]) if extra else layer.held()

    return [
        BatchKVCache(rows, mx.concatenate([widened(a, more[0]), widened(b, more[1])], axis=1))
        for a, b in zip(first, second, strict=True)
    ]


def selected(layers: list[BatchKVCache], chosen: Sequence[int]) -> list[BatchKVCache]:
    """The cache of the chosen rows alone, without the padding that all of them have."""
    padding = [layers[0].rows.padding[row] for row in chosen]
    cut = min(padding)
    rows, places = Rows([p - cut for p in padding]), mx.array(list(chosen))
    return [BatchKVCache(rows, layer.held()[:, :, :, cut:][:, places]) for layer in layers]
