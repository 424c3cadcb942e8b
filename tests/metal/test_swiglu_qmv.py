"""The shipped Metal source of `swiglu_qmv`, run on the CPU: values, bytes, races."""

from itertools import cycle

import pytest

from mlx_llama3.model.kernels import swiglu_qmv
from mlx_llama3.model.layers.packed_linear import PackedLinear
from tests.metal_harness.checking.proof import prove

import mlx.core as mx
import mlx.nn as nn

# Half a unit in the last place of the output, and another order of summation.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2**-10, mx.bfloat16: 2**-7}


def exact(w13, x):
    """The result with the dequantized matrix, in float32."""
    part = w13.parts[0]
    scales, biases = part.scales.astype(mx.float32), part.biases.astype(mx.float32)
    matrix = mx.dequantize(part.weight, scales, biases, group_size=part.group_size, bits=part.bits)
    gate, up = mx.split(x.astype(mx.float32) @ matrix.T, 2, axis=-1)
    return (gate * mx.sigmoid(gate) * up).astype(x.dtype)


def prove_shape(dim, hidden, bits, group, dtype, rows=1):
    key = mx.random.key(dim + hidden + bits)
    parts = []
    for weight_key in mx.random.split(key, 2):
        linear = nn.Linear(dim, hidden, bias=False)
        linear.weight = mx.random.normal((hidden, dim), scale=dim**-0.5, key=weight_key)
        linear = nn.QuantizedLinear.from_linear(linear, group, bits)
        linear.scales, linear.biases = linear.scales.astype(dtype), linear.biases.astype(dtype)
        parts.append(linear)
    x = mx.random.normal((1, rows, dim), key=key).astype(dtype)
    return prove(
        *(swiglu_qmv.fused, exact, PackedLinear(parts), x),
        atol=2e-5,
        rtol=TOLERANCE[dtype],
        reads_once=["w", "scales", "biases"],
    )


FORMATS = [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128), (4, 64)]


@pytest.mark.parametrize(("form", "dtype"), list(zip(FORMATS, cycle(TOLERANCE))), ids=str)
def test_every_format(form, dtype):
    (dispatch,) = prove_shape(640, 32, *form, dtype).dispatches
    assert dispatch.checked.threadgroup_bytes == 0


@pytest.mark.parametrize(("dim", "hidden"), [(32, 4), (96, 8), (576, 64), (2048, 128)])
def test_every_size(dim, hidden):
    """Rows shorter than what a simdgroup reads at a time, and rows that are no multiple of it."""
    prove_shape(dim, hidden, 4, 32, mx.float32)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_several_rows_read_the_weights_once(rows):
    prove_shape(512, 16, 4, 64, mx.float16, rows)
