"""A cache of 8-bit keys and 4-bit or 8-bit values, but for the first positions and the newest.

    first 32, as they are | packed into records | newest 64 to 127, as they are

Attention looks at the first positions and at the last ones more than at all others: that these stay as they are leaves
an eighth of the error that the same bits make without it. And a new position costs no quantizing, only a copy into the
dense part, as in a plain cache; a whole block of the oldest ones there is packed at a time.

A position takes 108 bytes a KV head of 64 with 4-bit values, 136 with 8-bit ones (float16: 256, float32: 512): all
layers of Llama 3.2 1B 13.8 and 17.4 kB a token (float16: 32.8), of 3.1 8B 55.3 and 69.6 kB (131). The dense part takes
room for 168 positions on top of it.

Measured on the demo model, 1,024 tokens of English (`benchmarks/kv_quality.py`): KL divergence from the predictions
with a plain cache, and how often the best token is the same. The perplexity, 22.79, changes by 0.2 % at most.

    values   first  newest       divergence  same best token
    4 bits   0      0 to 7       25e-4       97.1 %
    4 bits   32     0 to 7       16e-4       98.3 %
    4 bits   0      0 to 63      15e-4       98.1 %
    4 bits   4      0 to 63      7.4e-4      99.0 %
    4 bits   32     0 to 63      7.0e-4      99.2 %
    4 bits   0      64 to 127    9.3e-4      98.3 %
    4 bits   4      64 to 127    3.8e-4      99.1 %
    4 bits   32     64 to 127    3.1e-4      99.7 %
    4 bits   64     64 to 127    3.1e-4      99.3 %
    8 bits   0      0 to 7       1.8e-4      99.3 %
    8 bits   32     64 to 127    0.2e-4      99.8 %
"""

import copy

from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.kernels import sdpa_quantized
from mlx_llama3.model.kernels.kv_packing import PackedLayout, pack, unpack
from mlx_llama3.model.layers.attention import scaled_dot_product_attention

import mlx.core as mx


class QuantizedKVCache(KVCache):
    """As `KVCache`, with most positions packed (`kv_records.py`).

    A chunk of a prompt attends to itself as it is, and is packed afterwards; of the past, one layer at a time is made
    dense for it. So a prompt takes no more memory than with a plain cache.

    A draft does not reach to where the next block is packed (`max_draft`): so decoding with drafts packs at the same
    positions as without.

    What belongs together is set together, at the end: Ctrl-C in the middle of a pass leaves what was there before it.

    layout: of the records. fused: whether the kernel of `sdpa_quantized` serves where it can.
    """

    FIRST, NEWEST, BLOCK = 32, 64, 64
    FEW = 8  # new positions, as a draft has them, that attend to the records without making them dense
    ROOM = FIRST + NEWEST + BLOCK + FEW

    def __init__(self, layout: PackedLayout, *, fused: bool = False) -> None:
        self.offset = 0
        self._layout = layout
        self._sdpa = sdpa_quantized.fused if fused else sdpa_quantized.reference
        self._packed = 0  # positions in records; those before and after them are dense, in their order
        self._dense: mx.array | None = None  # (2, B, n_kv_heads, ROOM, head_dim)
        self._records: mx.array | None = None  # (B, n_kv_heads, capacity, words)

    def attend(self, q: mx.array, kv: mx.array, scale: float, mask: str | mx.array | None) -> mx.array:
        """Append the new positions and attend to all so far; as `KVCache.attend`."""
        length = kv.shape[3]
        if length <= self.FEW and (mask == "causal" if length > 1 else not isinstance(mask, mx.array)):
            self._append(kv)
            lengths = (self._n_dense, self._packed)
            out = self._sdpa(q, self._dense, self._records, lengths, scale, self._layout)
            self._pack_oldest()
            return out
        keys, values = kv[0, ...], kv[1, ...]
        if self.offset:
            keys, values = (mx.concatenate(pair, axis=2) for pair in zip(self.fetch(), (keys, values), strict=True))
        self._extend(kv)
        return scaled_dot_product_attention(q, keys, values, scale, mask)

    def update_and_fetch(self, kv: mx.array) -> tuple[mx.array, mx.array]:
        """Append `(2, B, n_kv_heads, S, head_dim)`; return all keys and values so far, as `fetch` does."""
        self._extend(kv)
        return self.fetch()

    def fetch(self) -> tuple[mx.array, mx.array]:
        """All keys and values so far, `(B, n_kv_heads, offset, head_dim)` each, in the dtype that came in."""
        dense = self._dense[:, :, :, : self._n_dense]
        if not self._packed:
            return dense[0, ...], dense[1, ...]
        packed = unpack(self._records[:, :, : self._packed], self._layout, dense.dtype)
        return tuple(
            mx.concatenate([dense[i, :, :, : self.FIRST], packed[i], dense[i, :, :, self.FIRST :]], axis=2)
            for i in range(2)
        )

    def trim(self, count: int) -> None:
        """Forget the last `count` positions. Raises ValueError if there are fewer."""
        packed = min(self._packed, max(0, self.offset - count - self.FIRST))
        super().trim(count)
        self._packed = packed

    def tensors(self) -> dict[str, mx.array]:
        """As `KVCache.tensors`: `dense`, and `records` if there are any."""
        if self._dense is None:
            return {}
        dense = {"dense": self._dense[:, :, :, : self._n_dense]}
        return dense | ({"records": self._records[:, :, : self._packed]} if self._packed else {})

    def restore(self, tensors: dict[str, mx.array], offset: int) -> None:
        """As `KVCache.restore`."""
        self._dense = self._records = None
        self.offset, self._packed = offset, 0
        if tensors:
            self._start(_padded(tensors["dense"], 3, self.ROOM))
        if "records" in tensors:
            self._records, self._packed = tensors["records"], tensors["records"].shape[2]

    def prefix(self, count: int) -> "QuantizedKVCache":
        """A cache of the first `count` positions, to go on from without changing this one, as `KVCache.prefix`."""
        copied = copy.copy(self)
        if self._dense is not None:
            copied._dense, copied._records = self._dense[...], self._records[...]
        copied.trim(self.offset - count)
        return copied

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for `mx.eval`; empty before the first update."""
        return [] if self._dense is None else [self._dense, self._records]

    @property
    def max_draft(self) -> int:
        """As `KVCache.max_draft`: short of where the next block is packed, which may not hold what is trimmed again."""
        return max(1, self._full - 1 - self._n_dense)

    @property
    def _full(self) -> int:
        """Dense positions with which a block is packed."""
        return self.FIRST + self.NEWEST + self.BLOCK

    @property
    def _n_dense(self) -> int:
        return self.offset - self._packed

    def _append(self, kv: mx.array) -> None:
        """A few positions into the dense part, in place; there is always room for them."""
        if self._dense is None:
            self._start(_padded(kv[:, :, :, :0], 3, self.ROOM))
        start = self._n_dense
        self._dense[:, :, :, start : start + kv.shape[3]] = kv
        self.offset += kv.shape[3]

    def _pack_oldest(self) -> None:
        """Pack a block, once so many positions more than the newest ones are dense."""
        first, end = self.FIRST + self.BLOCK, self._n_dense
        if end < self._full:
            return
        records, packed = self._recorded(self._dense[:, :, :, self.FIRST : first])
        dense = self._dense[...]
        dense[:, :, :, self.FIRST : self.FIRST + end - first] = self._dense[:, :, :, first:end]
        self._dense, self._records, self._packed = dense, records, packed

    def _extend(self, kv: mx.array) -> None:
        """Many positions: what is dense already and they, packed but for the first ones and the newest."""
        end = self.offset + kv.shape[3]
        if self._dense is not None:
            kv = mx.concatenate([self._dense[:, :, :, : self._n_dense], kv], axis=3)
        count = max(0, kv.shape[3] - self.FIRST - self.NEWEST) // self.BLOCK * self.BLOCK
        first, block, newest = mx.split(kv, [self.FIRST, self.FIRST + count], axis=3)
        dense = _padded(mx.concatenate([first, newest], axis=3), 3, self.ROOM)
        if self._dense is None:
            self._start(dense)
        records, packed = self._recorded(block) if count else (self._records, self._packed)
        self._dense, self._records, self._packed, self.offset = dense, records, packed, end

    def _start(self, dense: mx.array) -> None:
        records = mx.zeros((*dense.shape[1:3], self.STEP, self._layout.words), mx.uint32)
        self._dense, self._records = dense, records

    def _recorded(self, kv: mx.array) -> tuple[mx.array, int]:
        """The records with `(2, B, n_kv_heads, N, head_dim)` packed behind them, and how many positions they are."""
        start, end = self._packed, self._packed + kv.shape[3]
        records = self._records[...]  # an array of its own over the same buffer
        if end > records.shape[2]:
            records = _padded(records[:, :, :start], 2, -(-end // self.STEP) * self.STEP)
        records[:, :, start:end] = pack(kv, self._layout)
        return records, end


def _padded(x: mx.array, axis: int, length: int) -> mx.array:
    """`x` with zeros after it along `axis`, to `length`."""
    return mx.pad(x, [(0, length - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])
