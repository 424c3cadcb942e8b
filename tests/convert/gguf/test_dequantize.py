"""Quantized blocks: every type against the gguf package bit for bit, and repacking against MLX's own kernels."""

import gguf
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from convert.gguf.dequantize import (
    AFFINE_BITS,
    CHUNK_VALUES,
    WIDE_SCALES,
    dequantize,
    requantize_8_bit,
    rounding_error,
    to_affine,
)
from convert.gguf.types import LAYOUTS, TYPE_NUMBERS

import mlx.core as mx

FLOAT16_SCALES = ("d", "m", "dmin")


def random_rows(type_name: str, rows: int, blocks: int, seed: int, scales: str = "weights") -> np.ndarray:
    """Random stored rows: uint8 (rows, row bytes), with `scales` like those of real "weights", or of "any" bits."""
    layout, rng = LAYOUTS[type_name], np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, blocks * layout.n_bytes), dtype=np.uint8)
    if scales == "weights" and layout.fields.names:
        view = raw.reshape(-1).view(layout.fields)
        for field in FLOAT16_SCALES:
            if field in layout.fields.names:
                view[field] = rng.standard_normal(view.size) * 1e-2
    return raw


def reference(raw: np.ndarray, type_name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    # All NaNs count as equal.
    np.testing.assert_array_equal(actual.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def mlx_values(affine, bits: int) -> np.ndarray:
    weight, scales, biases = (mx.array(part) for part in affine)
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return np.array(mx.dequantize(weight, scales, biases, group_size=32, bits=bits))


@pytest.mark.parametrize("type_name", LAYOUTS)
def test_layouts_agree_with_the_gguf_package(type_name):
    kind = gguf.GGMLQuantizationType[type_name]
    assert int(kind) == TYPE_NUMBERS[type_name]
    assert gguf.GGML_QUANT_SIZES[kind] == (LAYOUTS[type_name].values, LAYOUTS[type_name].n_bytes)


@pytest.mark.parametrize("type_name", LAYOUTS)
@pytest.mark.parametrize("scales", ["weights", "any"])
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_dequantize_is_bit_for_bit_that_of_gguf(type_name, scales, rows, blocks, seed):
    raw = random_rows(type_name, rows, blocks, seed, scales)
    assert_same_bits(dequantize(raw, type_name), reference(raw, type_name))


@pytest.mark.parametrize("type_name", LAYOUTS)
def test_dequantize_of_more_than_one_chunk(type_name):
    blocks = CHUNK_VALUES // LAYOUTS[type_name].values // 2
    raw = random_rows(type_name, 5, blocks + 1, seed=1)
    assert_same_bits(dequantize(raw, type_name), reference(raw, type_name))


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 4), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-24, 6))
def test_affine_with_float16_scales_changes_no_value(type_name, rows, blocks, seed, exponent):
    """Scales from float16's subnormals up to 64: the biases -8 d, -16 d and -128 d are exact all the way."""
    raw = random_rows(type_name, rows, blocks, seed)
    view = raw.reshape(-1).view(LAYOUTS[type_name].fields)
    view["d"] = np.ldexp(np.random.default_rng(seed).uniform(-1, 1, view.size), exponent)
    affine = to_affine(raw, type_name)
    assert affine.scales.dtype == affine.biases.dtype == np.float16
    np.testing.assert_array_equal(mlx_values(affine, AFFINE_BITS[type_name]), dequantize(raw, type_name))


@pytest.mark.parametrize("type_name", sorted(WIDE_SCALES))
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 4), blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_k_quants_are_exact_with_float32_scales(type_name, rows, blocks, seed):
    raw = random_rows(type_name, rows, blocks, seed)
    affine = to_affine(raw, type_name, np.float32)
    np.testing.assert_array_equal(mlx_values(affine, AFFINE_BITS[type_name]), dequantize(raw, type_name))


@pytest.mark.parametrize("type_name", sorted(WIDE_SCALES))
def test_k_quants_with_float16_scales_report_their_error(type_name):
    raw = random_rows(type_name, 16, 8, seed=3)
    exact, rounded = dequantize(raw, type_name), mlx_values(to_affine(raw, type_name), AFFINE_BITS[type_name])
    error = np.sqrt(np.mean((rounded - exact) ** 2) / np.mean(exact**2))
    assert 0 < error < 2**-11  # each of scale and bias is off by at most half a unit of float16
    assert rounding_error(raw, type_name) == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("type_name", AFFINE_BITS)
def test_affine_has_the_layout_of_mx_quantize(type_name):
    bits = AFFINE_BITS[type_name]
    affine = to_affine(random_rows(type_name, 6, 512 // LAYOUTS[type_name].values, seed=4), type_name)
    for ours, theirs in zip(affine, mx.quantize(mx.zeros((6, 512)), group_size=32, bits=bits), strict=True):
        assert ours.shape == tuple(theirs.shape)
    assert affine.weight.dtype == np.uint32


@pytest.mark.parametrize("type_name", AFFINE_BITS)
def test_affine_works_in_quantized_matmul(type_name):
    bits = AFFINE_BITS[type_name]
    raw = random_rows(type_name, 24, 512 // LAYOUTS[type_name].values, seed=5)
    weight, scales, biases = (mx.array(part) for part in to_affine(raw, type_name, np.float32))
    x = np.random.default_rng(6).standard_normal((3, 512)).astype(np.float32)
    y = mx.quantized_matmul(mx.array(x), weight, scales, biases, transpose=True, group_size=32, bits=bits)
    expected = x.astype(np.float64) @ dequantize(raw, type_name).astype(np.float64).T
    np.testing.assert_allclose(np.array(y), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_a_bias_beyond_float16_becomes_infinite_and_is_exact_in_float32():
    raw = random_rows("Q8_0", 1, 2, seed=7)
    raw.reshape(-1).view(LAYOUTS["Q8_0"].fields)["d"] = [600, 1]
    assert np.isinf(to_affine(raw, "Q8_0").biases).tolist() == [[True, False]]
    np.testing.assert_array_equal(mlx_values(to_affine(raw, "Q8_0", np.float32), 8), dequantize(raw, "Q8_0"))


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_values_come_back_from_the_gguf_packages_quantizer(type_name):
    """A known matrix, so that a shared misreading of random bytes cannot hide."""
    values = np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name])
    step = 2 / 64 * 32 / {"Q4_0": 4, "Q4_1": 15, "Q5_0": 8, "Q5_1": 31, "Q8_0": 127}[type_name]
    np.testing.assert_allclose(dequantize(raw, type_name), values, atol=step)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-20, 10), constant=st.booleans())
@example(seed=34, exponent=5, constant=True)
def test_quantized_anew_within_half_a_scale(seed, exponent, constant):
    values = np.ldexp(np.random.default_rng(seed).standard_normal((4, 128), np.float32), exponent)
    if constant:
        values[:, 32:] = values[0, 0]
    affine = requantize_8_bit(values)
    half_scales = np.repeat(affine.scales.astype(np.float32), 32, axis=1) / 2
    rounding = np.abs(values) * 2**-23  # of the sum of a small scale's product and a large bias, in float32
    assert np.all(np.abs(mlx_values(affine, 8) - values) <= half_scales * 1.001 + rounding)
    # The scale is no larger than float16 asks: 255 steps over the group, and what the rounding of the bias adds.
    spans = np.ptp(values.reshape(4, -1, 32), axis=-1) + 2**-10 * np.abs(values).max(axis=1, keepdims=True) + 2**-24
    assert np.all(affine.scales <= spans / 255 * (1 + 2**-10) + 2**-24)


def test_quantizing_anew_what_float16_cannot_hold():
    affine = requantize_8_bit(np.array([[-1e6] * 32, [np.nan] * 32, [0] * 32], np.float32))
    assert (np.isfinite(affine.scales) & np.isfinite(affine.biases)).tolist() == [[False], [False], [True]]
