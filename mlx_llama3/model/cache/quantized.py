"""A KV cache of 8-bit keys and 4-bit or 8-bit values, except for the first positions and the newest.

    first 32: dense | packed (quantized) | newest 64 to 127: dense

Attention gives the first and the latest positions more weight than all others. Keeping these unquantized cuts the error
to an eighth. It also saves quantizing every new position: a new one is copied into the dense part, as in a plain cache,
and the oldest ones there are packed a whole block at a time.

A position takes 108 bytes for a KV head of 64 with 4-bit values, and 136 with 8-bit ones (float16: 256, float32: 512).
All layers of Llama 3.2 1B take 13.8 and 17.4 kB a token (float16: 32.8), those of 3.1 8B take 55.3 and 69.6 kB (131).
The dense part takes room for 168 positions on top of that.

Measured on the demo model with 1,024 tokens of English (`benchmarks/kv_quality.py`): the KL divergence from the
predictions with a plain cache, and how often the most likely token is the same. The perplexity, 22.79, changes by 0.2 %
at most.

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
from mlx_llama3.model.kernels.kernel_set import Rows
from mlx_llama3.model.kernels.kv_packing import PackedLayout, pack, unpack
from mlx_llama3.model.layers.attention import scaled_dot_product_attention

import mlx.core as mx


class QuantizedKVCache(KVCache):
    """`KVCache` with most positions packed (`kernels/kv_packing.py`).

    A chunk of a prompt attends to its own keys and values unquantized, and is packed afterwards. The packed past is
    dequantized for it, one layer at a time, so a prompt's peak of memory is no higher than with a plain cache.

    A draft ends before the next block is packed (`max_draft`), so decoding with drafts packs at the same positions as
    decoding without.

    Attributes that depend on each other are set in one statement at the end of a pass, so that Ctrl-C in the middle
    leaves the cache as it was before.

    Args:
        layout: layout of a packed position.
        fused: for how many new positions of a sequence to attend with the kernel `sdpa_quantized`.
    """

    FIRST, NEWEST, BLOCK = 32, 64, 64
    FEW = 8  # up to this many new positions (a draft) attend to packed positions without dequantizing them
    ROOM = FIRST + NEWEST + BLOCK + FEW

    def __init__(self, layout: PackedLayout, *, fused: Rows = Rows.NONE) -> None:
        self.offset = 0
        self._layout, self._fused = layout, fused
        self._n_packed = 0  # the packed positions come after the first FIRST, which are dense like all later ones
        self._dense: mx.array | None = None  # (2, B, n_kv_heads, ROOM, head_dim)
        self._packed: mx.array | None = None  # uint32 (B, n_kv_heads, capacity, words)

    def attend(self, q: mx.array, kv: mx.array, scale: float, mask: str | mx.array | None) -> mx.array:
        """Append the new positions and attend to all positions so far, as `KVCache.attend`."""
        length = kv.shape[3]
        if length <= self.FEW and (mask == "causal" if length > 1 else not isinstance(mask, mx.array)):
            self._append(kv)
            lengths = (self._n_dense, self._n_packed)
            sdpa = sdpa_quantized.fused if Rows.of(length) in self._fused else sdpa_quantized.reference
            out = sdpa(q, self._dense, self._packed, lengths, scale, self._layout)
            self._pack_oldest()
            return out
        keys, values = kv[0, ...], kv[1, ...]
        if self.offset:
            keys, values = (mx.concatenate(pair, axis=2) for pair in zip(self.fetch(), (keys, values), strict=True))
        self._extend(kv)
        return scaled_dot_product_attention(q, keys, values, scale, mask)

    def update_and_fetch(self, kv: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values `(2, B, n_kv_heads, S, head_dim)`; return all so far, as `fetch`."""
        self._extend(kv)
        return self.fetch()

    def fetch(self) -> tuple[mx.array, mx.array]:
        """All keys and values so far, `(B, n_kv_heads, offset, head_dim)` each, in the dtype that was appended."""
        dense = self._dense[:, :, :, : self._n_dense]
        if not self._n_packed:
            return dense[0, ...], dense[1, ...]
        middle = unpack(self._packed[:, :, : self._n_packed], self._layout, dense.dtype)
        keys, values = (
            mx.concatenate([dense[i, :, :, : self.FIRST], middle[i], dense[i, :, :, self.FIRST :]], axis=2)
            for i in range(2)
        )
        return keys, values

    def trim(self, count: int) -> None:
        """Drop the last `count` positions. Raises ValueError if there are fewer."""
        n_packed = min(self._n_packed, max(0, self.offset - count - self.FIRST))
        super().trim(count)
        self._n_packed = n_packed

    def tensors(self) -> dict[str, mx.array]:
        """As `KVCache.tensors`: `dense`, and `records` (the packed positions) if there are any."""
        if self._dense is None:
            return {}
        dense = {"dense": self._dense[:, :, :, : self._n_dense]}
        return dense | ({"records": self._packed[:, :, : self._n_packed]} if self._n_packed else {})

    def restore(self, tensors: dict[str, mx.array], offset: int) -> None:
        """As `KVCache.restore`."""
        self._dense = self._packed = None
        self.offset, self._n_packed = offset, 0
        if tensors:
            self._start(_padded(tensors["dense"], 3, self.ROOM))
        if "records" in tensors:
            self._packed, self._n_packed = tensors["records"], tensors["records"].shape[2]

    def prefix(self, count: int) -> "QuantizedKVCache":
        """A cache with the first `count` positions, as `KVCache.prefix`."""
        copied = copy.copy(self)
        if self._dense is not None:
            copied._dense, copied._packed = self._dense[...], self._packed[...]
        copied.trim(self.offset - count)
        return copied

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for `mx.eval`; [] before the first update."""
        return [] if self._dense is None else [self._dense, self._packed]

    @property
    def max_draft(self) -> int:
        """As `KVCache.max_draft`. It stops before the next block is packed: packed positions cannot be trimmed."""
        return max(1, self._full - 1 - self._n_dense)

    @property
    def _full(self) -> int:
        """Number of dense positions at which a block of them is packed."""
        return self.FIRST + self.NEWEST + self.BLOCK

    @property
    def _n_dense(self) -> int:
        return self.offset - self._n_packed

    def _append(self, kv: mx.array) -> None:
        """Write a few positions into the dense part, in place; it always has room for `FEW`."""
        if self._dense is None:
            self._start(_padded(kv[:, :, :, :0], 3, self.ROOM))
        start = self._n_dense
        self._dense[:, :, :, start : start + kv.shape[3]] = kv
        self.offset += kv.shape[3]

    def _pack_oldest(self) -> None:
        """Pack the oldest block of the dense positions after the first, if `_full` positions are dense."""
        first, end = self.FIRST + self.BLOCK, self._n_dense
        if end < self._full:
            return
        packed, n_packed = self._with_packed(self._dense[:, :, :, self.FIRST : first])
        dense = self._dense[...]
        dense[:, :, :, self.FIRST : self.FIRST + end - first] = self._dense[:, :, :, first:end]
        self._dense, self._packed, self._n_packed = dense, packed, n_packed

    def _extend(self, kv: mx.array) -> None:
        """Append many positions: the dense ones and these are packed, except for the first and the newest."""
        end = self.offset + kv.shape[3]
        if self._dense is not None:
            kv = mx.concatenate([self._dense[:, :, :, : self._n_dense], kv], axis=3)
        count = max(0, kv.shape[3] - self.FIRST - self.NEWEST) // self.BLOCK * self.BLOCK
        first, block, newest = mx.split(kv, [self.FIRST, self.FIRST + count], axis=3)
        dense = _padded(mx.concatenate([first, newest], axis=3), 3, self.ROOM)
        if self._dense is None:
            self._start(dense)
        packed, n_packed = self._with_packed(block) if count else (self._packed, self._n_packed)
        self._dense, self._packed, self._n_packed, self.offset = dense, packed, n_packed, end

    def _start(self, dense: mx.array) -> None:
        packed = mx.zeros((*dense.shape[1:3], self.STEP, self._layout.words), mx.uint32)
        self._dense, self._packed = dense, packed

    def _with_packed(self, kv: mx.array) -> tuple[mx.array, int]:
        """The packed positions followed by those of `kv` `(2, B, n_kv_heads, N, head_dim)`, and their new number."""
        start, end = self._n_packed, self._n_packed + kv.shape[3]
        packed = self._packed[...]  # a new array over the same buffer: a write does not show in `self._packed`
        if end > packed.shape[2]:
            packed = _padded(packed[:, :, :start], 2, -(-end // self.STEP) * self.STEP)
        packed[:, :, start:end] = pack(kv, self._layout)
        return packed, end


def _padded(x: mx.array, axis: int, length: int) -> mx.array:
    """`x` padded with zeros at its end along `axis`, to `length`."""
    return mx.pad(x, [(0, length - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])
