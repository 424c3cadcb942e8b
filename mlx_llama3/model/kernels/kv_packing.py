"""Keys and values of one position and head, quantized, in one record of uint32 words.

    keys, 8 bits each | values, 4 or 8 bits each | a word for each group of keys | a word for each group of values

One buffer holds what would otherwise be six (numbers, scales and biases, of keys and of values): a block of positions
is one slice update, and attention reads one stream of memory.
"""

from dataclasses import dataclass

import mlx.core as mx

KEY_BITS = 8
KEY_GROUP = 64  # numbers that share a scale and a bias


@dataclass(frozen=True)
class PackedLayout:
    """Where everything stands in a record. Numbers are packed as `mx.quantize` packs them, the first one lowest.

    A group's word is its scale (lower half) and its bias, both float16. Values of 4 bits have groups of 32: that is one
    word more for a head of 64 than groups of 64, and changes the model's predictions a third less (KL divergence).

    head_dim 64, values of 4 bits: 16 + 8 + 1 + 2 words = 108 bytes; 8 bits: 34 words = 136 bytes; head_dim 128: 216 and
    272 bytes. In 16 bits the same position takes 256 and 512 bytes.
    """

    head_dim: int
    value_bits: int

    @property
    def value_group(self) -> int:
        """Numbers of a value that share a scale and a bias."""
        return 8 * self.value_bits

    @property
    def key_words(self) -> int:
        """Words of packed keys."""
        return self.head_dim * KEY_BITS // 32

    @property
    def value_words(self) -> int:
        """Words of packed values."""
        return self.head_dim * self.value_bits // 32

    @property
    def key_groups(self) -> int:
        """Groups of a key."""
        return self.head_dim // KEY_GROUP

    @property
    def value_groups(self) -> int:
        """Groups of a value."""
        return self.head_dim // self.value_group

    @property
    def words(self) -> int:
        """Words of a record."""
        return self.key_words + self.value_words + self.key_groups + self.value_groups

    def keys(self, records: mx.array) -> "Packed":
        """The keys of records `(..., words)`."""
        return self._part(records, 0, self.key_words, self.key_words + self.value_words, self.key_groups, KEY_BITS)

    def values(self, records: mx.array) -> "Packed":
        """The values of records `(..., words)`."""
        scales = self.key_words + self.value_words + self.key_groups
        return self._part(records, self.key_words, self.value_words, scales, self.value_groups, self.value_bits)

    def _part(self, records: mx.array, at: int, words: int, scales_at: int, groups: int, bits: int) -> "Packed":
        pairs = records[..., scales_at : scales_at + groups].view(mx.float16)
        return Packed(records[..., at : at + words], pairs, self.head_dim // groups, bits)


@dataclass(frozen=True)
class Packed:
    """Quantized numbers: `numbers` `(..., words)`, and `pairs` `(..., 2 groups)`, scale and bias of each group."""

    numbers: mx.array
    pairs: mx.array
    group_size: int
    bits: int

    def unpacked(self, dtype: mx.Dtype) -> mx.array:
        """`(..., head_dim)`, computed in float16, or float32 for a float32 model."""
        between = dtype if dtype == mx.float32 else mx.float16
        dense = mx.dequantize(self.numbers, *self._scales(between), group_size=self.group_size, bits=self.bits)
        return dense.astype(dtype)

    def scores(self, x: mx.array) -> mx.array:
        """Rows `x` `(..., rows, head_dim)` by the transpose of N of these: float32 `(..., rows, N)`."""
        if mx.default_device() == mx.gpu or self.bits != 8:
            return self._product(x, transpose=True)
        # On the CPU a dense product of the bare integers takes half the time; each group's by itself: every row once
        # for each group, with 0 for the others.
        scales, biases = (each.swapaxes(-1, -2)[..., None, :] for each in self._scales(mx.float32))
        groups = scales.shape[-3]
        own = mx.arange(groups)[:, None, None] == mx.arange(x.shape[-1]) // self.group_size
        apart = mx.where(own, x[..., None, :, :], 0)  # (..., groups, rows, head_dim)
        integers = self.numbers.view(mx.uint8).astype(mx.float32).swapaxes(-1, -2)
        products = (apart.flatten(-3, -2) @ integers).reshape(*apart.shape[:-1], -1)  # (..., groups, rows, N)
        return (products * scales + apart.sum(-1, keepdims=True) * biases).sum(-3)

    def sums(self, weights: mx.array) -> mx.array:
        """The sum of N of these by each row of `weights` `(..., rows, N)`: float32 `(..., rows, head_dim)`."""
        return self._product(weights, transpose=False)

    def _product(self, x: mx.array, *, transpose: bool) -> mx.array:
        scales, biases = self._scales(mx.float32)
        return mx.quantized_matmul(
            x, self.numbers, scales, biases, transpose=transpose, group_size=self.group_size, bits=self.bits
        )

    def _scales(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Scales and biases, `(..., groups)` each."""
        pairs = self.pairs.astype(dtype)
        return pairs[..., ::2], pairs[..., 1::2]


def pack(kv: mx.array, layout: PackedLayout) -> mx.array:
    """Keys and values `(2, B, n_kv_heads, N, head_dim)` -> records, uint32 `(B, n_kv_heads, N, words)`."""
    keys, key_pairs = _quantized(kv[0, ...], KEY_GROUP, KEY_BITS)
    values, value_pairs = _quantized(kv[1, ...], layout.value_group, layout.value_bits)
    return mx.concatenate([keys, values, key_pairs, value_pairs], axis=-1)


def unpack(records: mx.array, layout: PackedLayout, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Records `(B, n_kv_heads, N, words)` -> keys and values, `(B, n_kv_heads, N, head_dim)` each."""
    return layout.keys(records).unpacked(dtype), layout.values(records).unpacked(dtype)


def _quantized(x: mx.array, group: int, bits: int) -> tuple[mx.array, mx.array]:
    """`(..., head_dim)` -> packed numbers and the groups' words, uint32.

    From the smallest number of a group to its largest in equal steps, and the numbers are chosen for the scale and the
    bias as they are stored, after rounding. `mx.quantize` moves the ends so that 0 is hit, and rounds scale and bias to
    the dtype of x afterwards, which in bfloat16 errs by as much as a step of 8 bits; it changes the model's predictions
    a quarter more.
    """
    groups = x.astype(mx.float32).reshape(*x.shape[:-1], -1, group)
    low, high = groups.min(-1), groups.max(-1)  # (..., head_dim / group)
    most = 2**bits - 1
    pairs = mx.stack([(high - low) / most, low], axis=-1).astype(mx.float16)
    scale, bias = (pairs[..., i, None].astype(mx.float32) for i in range(2))
    steps = mx.round((groups - bias) / mx.where(scale == 0, 1, scale))
    numbers = mx.clip(steps, 0, most).astype(mx.uint8).reshape(x.shape)
    if bits == 4:
        numbers = numbers[..., ::2] | (numbers[..., 1::2] << 4)
    return numbers.view(mx.uint32), pairs.flatten(-2).view(mx.uint32)
