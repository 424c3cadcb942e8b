"""The shipped Metal source of `norm_swiglu_qmv`, run on the CPU: values, bytes, races."""

from itertools import cycle

import pytest
from correctly_rounded import prove_rounded
from quantized_product import NORM, normed_product64, packed_linear, stream_inputs, swiglu64

from mlx_llama3.model.kernels import norm_swiglu_qmv

import mlx.core as mx

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def prove_shape(dim, hidden, bits, group, dtype, batch=1, length=1, scale=1.0, eps=1e-5):
    w13 = packed_linear(dim, (hidden, hidden), bits, group, dtype, mx.random.key(dim + hidden + bits))
    x, update, weight = stream_inputs(dim, dtype, batch, length, scale)
    stream, squares, product, error = normed_product64(x, update, weight, eps, w13)
    out, out_error = swiglu64(product, error)
    return prove_rounded(
        *(norm_swiglu_qmv.fused, norm_swiglu_qmv.reference, x, update, weight, eps, w13),
        exact=(stream, out, squares),
        errors=(1e-30, out_error + 1e-30, NORM * squares),
        reads_once=["w", "scales", "biases"],
    )


FORMATS = [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128), (4, 64)]


@pytest.mark.parametrize(("form", "dtype"), list(zip(FORMATS, cycle(DTYPES))), ids=str)
def test_every_format(form, dtype):
    (dispatch,) = prove_shape(640, 32, *form, dtype).dispatches
    assert dispatch.checked.threadgroup_bytes == 0
    assert dispatch.traffic["stream"].written == 640 * dtype.size


@pytest.mark.parametrize(("dim", "hidden"), [(32, 4), (96, 8), (576, 64), (2048, 128)])
def test_every_size(dim, hidden):
    """Rows shorter than what a simdgroup reads at a time, and rows that are no multiple of it."""
    prove_shape(dim, hidden, 4, 32, mx.float32)


@pytest.mark.parametrize(("dtype", "bits"), [(mx.float16, 4), (mx.bfloat16, 8)], ids=str)
def test_16_bits_are_rounded_once(dtype, bits):
    """With many results, some are as far from the exact one as an earlier rounding to 16 bits would take them."""
    prove_shape(1024, 256, bits, 64, dtype)


@pytest.mark.parametrize("scale", [1e-4, 100.0])
def test_small_and_large_streams(scale):
    prove_shape(576, 32, 4, 64, mx.float32, scale=scale)


@pytest.mark.parametrize("eps", [1e-6, 1.2345678e-3, 0.5])
def test_every_eps(eps):
    """Numbers so small that eps is a part of the sum that matters."""
    prove_shape(64, 8, 4, 32, mx.float32, scale=eps**0.5, eps=eps)


@pytest.mark.parametrize(("batch", "length"), [(1, 2), (3, 1), (2, 2)])
def test_several_rows_read_the_weights_once(batch, length):
    prove_shape(512, 16, 4, 64, mx.float16, batch, length)
