"""The shipped Metal source of `swiglu_qmv`, run on the CPU: values, bytes, races."""

from itertools import cycle

import numpy as np
import pytest
from correctly_rounded import double, prove_rounded
from quantized_product import RELATIVE, dequantized, packed_linear, swiglu64

from mlx_llama3.model.kernels import swiglu_qmv

import mlx.core as mx

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def exact(w13, x):
    """The results in float64, and the errors that float32 dot products may cause."""
    matrix, x = dequantized(w13), double(x)
    return swiglu64(x @ matrix.T, RELATIVE * np.abs(x) @ np.abs(matrix).T)


def prove_shape(dim, hidden, bits, group, dtype, rows=1, scale=1.0):
    key = mx.random.key(dim + hidden + bits)
    w13 = packed_linear(dim, (hidden, hidden), bits, group, dtype, key)
    x = (scale * mx.random.normal((1, rows, dim), key=key)).astype(dtype)
    result, error = exact(w13, x)
    return prove_rounded(
        *(swiglu_qmv.fused, swiglu_qmv.reference, w13, x),
        exact=[result],
        errors=[error],
        reads_once=["w", "scales", "biases"],
    )


FORMATS = [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128), (4, 64)]


@pytest.mark.parametrize(("form", "dtype"), list(zip(FORMATS, cycle(DTYPES))), ids=str)
def test_every_format(form, dtype):
    (dispatch,) = prove_shape(640, 32, *form, dtype).dispatches
    assert dispatch.checked.threadgroup_bytes == 0


@pytest.mark.parametrize(("dim", "hidden"), [(32, 4), (96, 8), (576, 64), (2048, 128)])
def test_every_size(dim, hidden):
    """Rows shorter than what a simdgroup reads at a time, and rows that are no multiple of it."""
    prove_shape(dim, hidden, 4, 32, mx.float32)


def test_fewest_elements():
    """The smallest matrix has the 8 scales from which on MLX gives an input as `device`."""
    (proven,) = prove_shape(32, 4, 8, 32, mx.float32).dispatches
    assert proven.dispatch.inputs[2].size == 8
    assert {each.space for each in proven.dispatch.kernel.buffers} == {"device"}


@pytest.mark.parametrize(("dtype", "bits"), [(mx.float16, 4), (mx.bfloat16, 8)], ids=str)
def test_16_bits_are_rounded_once(dtype, bits):
    """With many results, some are as far from the exact one as an earlier rounding to 16 bits would take them."""
    prove_shape(1024, 256, bits, 64, dtype)


@pytest.mark.parametrize("scale", [1e-3, 20.0])
def test_small_and_large_gates(scale):
    """Where silu is x / 2, and where it is 0 or x."""
    prove_shape(256, 32, 4, 64, mx.float32, scale=scale)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_several_rows_read_the_weights_once(rows):
    prove_shape(512, 16, 4, 64, mx.float16, rows)
