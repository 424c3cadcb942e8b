"""A KV cache in two buffers that take turns, for decoding on a GPU with two tokens in flight.

A slice update writes in place only if nothing else holds the buffer; otherwise MLX copies all of it first. MLX holds an
operation's inputs until the GPU has run it. The next token is encoded while a token is computed
(`generation/decoding.py`), so its slice update may find the buffer held by the attention of the token before. A plain
cache is then copied in every layer for every token, and is in memory up to three times. A buffer that was used two
tokens ago is free: that token was read before the next one was built.

`python -m benchmarks.cache_copies` shows both, and for which models and chips it matters.
"""

from typing import Self

from mlx_llama3.model.cache.kv_cache import KVCache

import mlx.core as mx


class DoubleBufferedKVCache(KVCache):
    """`KVCache` whose pass writes to the buffer that the pass before did not use.

    That buffer lacks what the pass before appended, so it gets these positions too, from the small array that held
    them. The second buffer takes its memory when it is first written: at the first token after a prompt, or after the
    buffers have grown.

    Attributes that depend on each other are set in one statement, so that Ctrl-C in a pass loses no position.
    """

    # Numbers of a buffer up to which there are two. A command buffer takes arrays of about 40 million numbers together.
    # With larger caches a token fills so many of them that MLX waits for the token before, and nothing is copied.
    MOST = 24 << 20

    def __init__(self) -> None:
        super().__init__()
        self._other: mx.array | None = None  # the buffer of the pass before the last
        self._shared = 0  # number of positions, from the first on, that both buffers hold
        self._latest: mx.array | None = None  # the positions after these, which `_kv` alone holds

    def update_and_fetch(self, kv: mx.array) -> tuple[mx.array, mx.array]:
        """As `KVCache.update_and_fetch`."""
        if self._other is not None:
            if missing := self.offset - self._shared:
                self._other[:, :, :, self._shared : self.offset] = self._latest[:, :, :, :missing]
            self._kv, self._other, self._shared, self._latest = self._other, self._kv, self.offset, kv
        keys, values = super().update_and_fetch(kv)
        if self._kv.size > self.MOST:
            self._other = self._latest = None
        elif self._other is None or self._other.shape != self._kv.shape:  # the first pass, or the buffer has grown
            self._other, self._shared, self._latest = self._kv[...], self.offset, None  # a write to it copies
        return keys, values

    def trim(self, count: int) -> None:
        """Drop the last `count` positions. Raises ValueError if there are fewer."""
        super().trim(count)
        self._shared = min(self._shared, self.offset)

    def restore(self, tensors: dict[str, mx.array], offset: int) -> None:
        """As `KVCache.restore`."""
        super().restore(tensors, offset)
        self._other = self._latest = None

    def prefix(self, count: int) -> Self:
        """As `KVCache.prefix`."""
        copied = super().prefix(count)
        copied._other = copied._latest = None
        return copied

    @property
    def state(self) -> list[mx.array]:
        """Both buffers, for `mx.eval`; [] before the first update."""
        return super().state + ([] if self._other is None else [self._other])
