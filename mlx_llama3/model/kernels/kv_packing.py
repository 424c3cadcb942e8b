"""Quantized keys and values: those of one position and one head are packed into one row of uint32 words.

    key, 8 bits a number | value, 4 or 8 bits a number | a word for each group of the key | one for each of the value

One buffer holds what would otherwise be six (integers, scales and biases, of keys and of values). So a block of
positions is written by one slice update, and attention reads one contiguous stream of memory.
"""

from dataclasses import dataclass

import mlx.core as mx

KEY_BITS = 8
KEY_GROUP = 64  # numbers that share a scale and a bias


@dataclass(frozen=True)
class PackedLayout:
    """The layout of a packed position: the words of one key and one value.

    Integers are packed as by `mx.quantize`, the first one in the lowest bits. The word of a group is its scale (lower
    half) and its bias (upper half), both float16. Values of 4 bits have groups of 32: for a head of 64 this is one word
    more than groups of 64, and changes the model's predictions a third less (KL divergence).

    With head_dim 64, a position takes 16 + 8 + 1 + 2 words = 108 bytes if values have 4 bits, and 34 words = 136 bytes
    if they have 8; with head_dim 128, 216 and 272 bytes. In 16 bits the same position takes 256 and 512 bytes.
    """

    head_dim: int
    value_bits: int

    @property
    def value_group(self) -> int:
        """Numbers of a value that share a scale and a bias."""
        return 8 * self.value_bits

    @property
    def key_words(self) -> int:
        """Words of a key's integers."""
        return self.head_dim * KEY_BITS // 32

    @property
    def value_words(self) -> int:
        """Words of a value's integers."""
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
        """Words of a packed position."""
        return self.key_words + self.value_words + self.key_groups + self.value_groups

    def keys(self, packed: mx.array) -> "QuantizedArray":
        """The keys of packed positions `(..., words)`."""
        return self._slice(packed, 0, self.key_words, self.key_words + self.value_words, self.key_groups, KEY_BITS)

    def values(self, packed: mx.array) -> "QuantizedArray":
        """The values of packed positions `(..., words)`."""
        scales = self.key_words + self.value_words + self.key_groups
        return self._slice(packed, self.key_words, self.value_words, scales, self.value_groups, self.value_bits)

    def _slice(self, packed: mx.array, at: int, words: int, scales_at: int, groups: int, bits: int) -> "QuantizedArray":
        scales_and_biases = packed[..., scales_at : scales_at + groups].view(mx.float16)
        return QuantizedArray(packed[..., at : at + words], scales_and_biases, self.head_dim // groups, bits)


@dataclass(frozen=True)
class QuantizedArray:
    """Quantized keys or values, as views of packed positions.

    integers: uint32 `(..., words)`. scales_and_biases: float16 `(..., 2 groups)`, scale and bias of each group in turn.
    """

    integers: mx.array
    scales_and_biases: mx.array
    group_size: int
    bits: int

    def dequantized(self, dtype: mx.Dtype) -> mx.array:
        """`(..., head_dim)` in `dtype`; computed in float32 if that is `dtype`, else in float16."""
        compute_dtype = dtype if dtype == mx.float32 else mx.float16
        dense = mx.dequantize(self.integers, *self._scales(compute_dtype), group_size=self.group_size, bits=self.bits)
        return dense.astype(dtype)

    def scores(self, x: mx.array) -> mx.array:
        """The product of x `(..., rows, head_dim)` with these N rows transposed: float32 `(..., rows, N)`."""
        if mx.default_device() == mx.gpu or self.bits != 8:
            return self._product(x, transpose=True)
        # On the CPU, a dense product with the bare integers takes half the time. It needs one result for each group, so
        # x is repeated for each group, with 0 outside of it.
        scales, biases = (part.swapaxes(-1, -2)[..., None, :] for part in self._scales(mx.float32))
        groups = scales.shape[-3]
        in_group = mx.arange(groups)[:, None, None] == mx.arange(x.shape[-1]) // self.group_size
        by_group = mx.where(in_group, x[..., None, :, :], 0)  # (..., groups, rows, head_dim)
        integers = self.integers.view(mx.uint8).astype(mx.float32).swapaxes(-1, -2)
        products = (by_group.flatten(-3, -2) @ integers).reshape(*by_group.shape[:-1], -1)  # (..., groups, rows, N)
        return (products * scales + by_group.sum(-1, keepdims=True) * biases).sum(-3)

    def sums(self, weights: mx.array) -> mx.array:
        """The product of weights `(..., rows, N)` with these N rows: float32 `(..., rows, head_dim)`."""
        return self._product(weights, transpose=False)

    def _product(self, x: mx.array, *, transpose: bool) -> mx.array:
        scales, biases = self._scales(mx.float32)
        return mx.quantized_matmul(
            x, self.integers, scales, biases, transpose=transpose, group_size=self.group_size, bits=self.bits
        )

    def _scales(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Scales and biases, `(..., groups)` each."""
        interleaved = self.scales_and_biases.astype(dtype)
        return interleaved[..., ::2], interleaved[..., 1::2]


def pack(kv: mx.array, layout: PackedLayout) -> mx.array:
    """Keys and values `(2, B, n_kv_heads, N, head_dim)` -> packed positions, uint32 `(B, n_kv_heads, N, words)`."""
    keys, key_scales = _quantized(kv[0, ...], KEY_GROUP, KEY_BITS)
    values, value_scales = _quantized(kv[1, ...], layout.value_group, layout.value_bits)
    return mx.concatenate([keys, values, key_scales, value_scales], axis=-1)


def unpack(packed: mx.array, layout: PackedLayout, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Packed positions `(B, n_kv_heads, N, words)` -> keys and values, `(B, n_kv_heads, N, head_dim)` each."""
    return layout.keys(packed).dequantized(dtype), layout.values(packed).dequantized(dtype)


def _quantized(x: mx.array, group: int, bits: int) -> tuple[mx.array, mx.array]:
    """`(..., head_dim)` -> packed integers, and the words of the groups (scale and bias), both uint32.

    The steps of a group run evenly from its smallest number to its largest. Scale and bias are rounded to float16
    first, and the integers are chosen for the rounded ones. `mx.quantize` moves the ends so that 0 is exact, and rounds
    scale and bias to the dtype of x last, which in bfloat16 is off by as much as an 8-bit step. It changes the model's
    predictions a quarter more.
    """
    groups = x.astype(mx.float32).reshape(*x.shape[:-1], -1, group)
    low, high = groups.min(-1), groups.max(-1)  # (..., head_dim / group)
    largest = 2**bits - 1
    scale_and_bias = mx.stack([(high - low) / largest, low], axis=-1).astype(mx.float16)
    scale, bias = (scale_and_bias[..., i, None].astype(mx.float32) for i in range(2))
    steps = mx.round((groups - bias) / mx.where(scale == 0, 1, scale))
    integers = mx.clip(steps, 0, largest).astype(mx.uint8).reshape(x.shape)
    if bits == 4:
        integers = integers[..., ::2] | (integers[..., 1::2] << 4)
    return integers.view(mx.uint32), scale_and_bias.flatten(-2).view(mx.uint32)
