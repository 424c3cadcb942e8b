"""Packing to GGUF's blocks, bit for bit as the gguf package packs."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from convert.gguf.dequantize import dequantize
from convert.gguf.quantize import TYPES, quantize


def reference(values: np.ndarray, type_name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name]).view(np.uint8)


@pytest.mark.parametrize("type_name", TYPES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-30, 12))
def test_same_bytes_as_the_gguf_package(type_name, seed, exponent):
    values = np.ldexp(np.random.default_rng(seed).standard_normal((5, 96), np.float32), exponent)
    np.testing.assert_array_equal(quantize(values, type_name), reference(values, type_name))


@pytest.mark.parametrize("type_name", TYPES)
def test_halves_zeros_and_constants(type_name):
    # 127 / 127 = 1, so that these are halves exactly; they are rounded away from zero.
    halves = np.array([127, 0.5, -0.5, 1.5, -1.5, 2.5, -126.5] + [0] * 25, np.float32)
    values = np.stack([halves, np.zeros(32, np.float32), np.full(32, -0.25, np.float32)])
    np.testing.assert_array_equal(quantize(values, type_name), reference(values, type_name))


@pytest.mark.parametrize(("type_name", "steps"), [("Q8_0", 2 * 127), ("Q4_1", 15)])
def test_error_is_at_most_half_a_step(type_name, steps):
    values = np.random.default_rng(0).uniform(-1, 1, (8, 256)).astype(np.float32)
    # Half a step of at most 2 / steps, and the rounding of scale and minimum to float16.
    np.testing.assert_allclose(dequantize(quantize(values, type_name), type_name), values, atol=1 / steps + 2e-3)


@pytest.mark.parametrize("type_name", TYPES)
def test_packing_again_changes_nothing(type_name):
    """What was read from a GGUF is written to one without a further loss."""
    packed = quantize(np.random.default_rng(1).standard_normal((64, 512), np.float32), type_name)
    again = quantize(dequantize(packed, type_name), type_name)
    np.testing.assert_array_equal(dequantize(again, type_name), dequantize(packed, type_name))


@pytest.mark.parametrize(("type_name", "values"), [("F16", [1e5] * 32), ("Q8_0", [1e8] * 32), ("Q4_1", [1e8] * 32)])
def test_values_beyond_float16_become_infinite(type_name, values):
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(dequantize(quantize(np.array([values], np.float32), type_name), type_name)).any()
