"""What a layer remembers of the past: its rotated keys and its values."""

import copy

import mlx.core as mx


class KVCache:
    """Keys and values of one layer, in buffers that grow by `STEP` positions and are written in place.

    Growing by concatenation would copy everything for every token; here a token is one slice update.
    """

    STEP = 256

    def __init__(self) -> None:
        self.offset = 0
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `(B, n_kv_heads, S, head_dim)` each; return all so far, `(B, n_kv_heads, offset, head_dim)` each."""
        start, end = self.offset, self.offset + keys.shape[2]
        self._reserve(keys, values, end)
        self._keys[:, :, start:end] = keys
        self._values[:, :, start:end] = values
        self.offset = end
        return self.fetch()

    def fetch(self) -> tuple[mx.array, mx.array]:
        """All keys and values so far, `(B, n_kv_heads, offset, head_dim)` each."""
        return self._keys[:, :, : self.offset], self._values[:, :, : self.offset]

    def _reserve(self, keys: mx.array, values: mx.array, end: int) -> None:
        capacity = 0 if self._keys is None else self._keys.shape[2]
        if end <= capacity:
            return
        grown = -(-end // self.STEP) * self.STEP
        pad = [(0, 0), (0, 0), (0, grown - self.offset), (0, 0)]
        if self._keys is None:
            shape = (*keys.shape[:2], grown)
            self._keys = mx.zeros((*shape, keys.shape[3]), keys.dtype)
            self._values = mx.zeros((*shape, values.shape[3]), values.dtype)
        else:
            self._keys = mx.pad(self._keys[:, :, : self.offset], pad)
            self._values = mx.pad(self._values[:, :, : self.offset], pad)

    def trim(self, count: int) -> None:
        """Forget the last `count` positions. Raises ValueError if there are fewer."""
        if not 0 <= count <= self.offset:
            raise ValueError(f"cannot trim {count} positions of a cache that holds {self.offset}")
        self.offset -= count

    def prefix(self, count: int) -> "KVCache":
        """A cache of the first `count` positions, to go on from without changing this one.

        It shares the buffers until one of the two is written to, which copies them.
        """
        twin = copy.copy(self)
        twin.trim(self.offset - count)
        return twin

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for `mx.eval`; empty before the first update."""
        return [] if self._keys is None else [self._keys, self._values]


def check_start(cache: list[KVCache] | None, start_pos: int, n_layers: int) -> None:
    """Raise ValueError unless `start_pos` is where every layer's cache ends.

    A call that drops `start_pos` would rotate as if it began at position 0, and give plausible nonsense.
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
