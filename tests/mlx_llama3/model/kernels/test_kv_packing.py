"""Records of quantized keys and values: what stands where, and products with them, against float64."""

import numpy as np
import pytest

from mlx_llama3.model.kernels.kv_packing import PackedLayout, pack, unpack

import mlx.core as mx


@pytest.mark.parametrize(
    ("head_dim", "value_bits", "nbytes"), [(64, 4, 108), (64, 8, 136), (128, 4, 216), (128, 8, 272), (192, 4, 324)]
)
def test_sizes(head_dim, value_bits, nbytes):
    layout = PackedLayout(head_dim, value_bits)
    records = pack(mx.random.normal((2, 3, 2, 5, head_dim)), layout)
    assert records.shape == (3, 2, 5, layout.words) and records.dtype == mx.uint32
    assert 4 * layout.words == nbytes
    keys, values = unpack(records, layout, mx.float16)
    assert keys.shape == values.shape == (3, 2, 5, head_dim) and keys.dtype == values.dtype == mx.float16


def test_numbers_are_packed_as_mlx_packs_them():
    """Views of a record give `mx.dequantize` what it wants: scale times number, plus bias."""
    layout = PackedLayout(64, 4)
    (records,) = pack(mx.random.normal((2, 1, 1, 1, 64)), layout)[0]
    words = np.array(records[0])
    values = words[16:24]
    numbers = (values[:, None] >> (4 * np.arange(8)) & 15).reshape(2, 32)
    scale, bias = words[25:27].view(np.float16).reshape(2, 2).T.astype(np.float32)
    expected = (numbers * scale[:, None] + bias[:, None]).ravel()
    found = layout.values(records).unpacked(mx.float32)[0]
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-6)
    assert set(numbers.min(-1)) == {0} and set(numbers.max(-1)) == {15}


@pytest.mark.parametrize("value_bits", [4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_products_without_unpacking(head_dim, value_bits):
    """Rows by keys, and by values, as with the unpacked numbers in float64, to 1e-6 of the largest."""
    layout = PackedLayout(head_dim, value_bits)
    kv = mx.random.normal((2, 2, 3, 40, head_dim), key=mx.random.key(1)) + mx.arange(head_dim) / 10
    records = pack(kv, layout)[:, :, 3:]
    keys, values = (np.array(each, np.float64) for each in unpack(records, layout, mx.float32))
    x, weights = mx.random.normal((2, 3, 4, head_dim)), mx.random.uniform(shape=(2, 3, 4, 37))
    for found, expected in (
        (layout.keys(records).scores(x), np.array(x, np.float64) @ keys.swapaxes(-1, -2)),
        (layout.values(records).sums(weights), np.array(weights, np.float64) @ values),
    ):
        assert found.dtype == mx.float32
        np.testing.assert_allclose(np.array(found), expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_types_of_16_bits_are_measured_in_float32(dtype):
    """Scales and biases are the same as of the same numbers in float32."""
    layout, kv = PackedLayout(64, 4), mx.random.normal((2, 1, 1, 9, 64)).astype(dtype)
    np.testing.assert_array_equal(np.array(pack(kv, layout)), np.array(pack(kv.astype(mx.float32), layout)))
