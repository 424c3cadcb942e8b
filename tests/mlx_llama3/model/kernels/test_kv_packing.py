"""Packed keys and values: their layout, and products with them against float64."""

import numpy as np
import pytest

from mlx_llama3.model.kernels.kv_packing import PackedLayout, pack, unpack

import mlx.core as mx


@pytest.mark.parametrize(
    ("head_dim", "value_bits", "nbytes"), [(64, 4, 108), (64, 8, 136), (128, 4, 216), (128, 8, 272), (192, 4, 324)]
)
def test_sizes(head_dim, value_bits, nbytes):
    layout = PackedLayout(head_dim, value_bits)
    packed = pack(mx.random.normal((2, 3, 2, 5, head_dim)), layout)
    assert packed.shape == (3, 2, 5, layout.words) and packed.dtype == mx.uint32
    assert 4 * layout.words == nbytes
    keys, values = unpack(packed, layout, mx.float16)
    assert keys.shape == values.shape == (3, 2, 5, head_dim) and keys.dtype == values.dtype == mx.float16


def test_integers_are_packed_as_by_mlx():
    """`mx.dequantize` of the views of a packed position is scale * integer + bias."""
    layout = PackedLayout(64, 4)
    (packed,) = pack(mx.random.normal((2, 1, 1, 1, 64)), layout)[0]
    words = np.array(packed[0])
    values = words[16:24]
    integers = (values[:, None] >> (4 * np.arange(8)) & 15).reshape(2, 32)
    scale, bias = words[25:27].view(np.float16).reshape(2, 2).T.astype(np.float32)
    expected = (integers * scale[:, None] + bias[:, None]).ravel()
    dequantized = layout.values(packed).dequantized(mx.float32)[0]
    np.testing.assert_allclose(np.array(dequantized), expected, rtol=1e-6)
    assert set(integers.min(-1)) == {0} and set(integers.max(-1)) == {15}


@pytest.mark.parametrize("value_bits", [4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_products_without_unpacking(head_dim, value_bits):
    """Products with packed keys and values are those with unpacked ones in float64, within 1e-6 of the largest."""
    layout = PackedLayout(head_dim, value_bits)
    kv = mx.random.normal((2, 2, 3, 40, head_dim), key=mx.random.key(1)) + mx.arange(head_dim) / 10
    packed = pack(kv, layout)[:, :, 3:]
    keys, values = (np.array(part, np.float64) for part in unpack(packed, layout, mx.float32))
    x, weights = mx.random.normal((2, 3, 4, head_dim)), mx.random.uniform(shape=(2, 3, 4, 37))
    for product, expected in (
        (layout.keys(packed).scores(x), np.array(x, np.float64) @ keys.swapaxes(-1, -2)),
        (layout.values(packed).sums(weights), np.array(weights, np.float64) @ values),
    ):
        assert product.dtype == mx.float32
        np.testing.assert_allclose(np.array(product), expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_16_bit_dtypes_are_packed_in_float32(dtype):
    """The packed words are those of the same numbers in float32."""
    layout, kv = PackedLayout(64, 4), mx.random.normal((2, 1, 1, 9, 64)).astype(dtype)
    np.testing.assert_array_equal(np.array(pack(kv, layout)), np.array(pack(kv.astype(mx.float32), layout)))
