"""The shipped Metal source of `add_rms_norm`, run on the CPU: values, bytes, races, barriers."""

from itertools import cycle

import pytest

from mlx_llama3.model.kernels import add_rms_norm
from tests.metal_harness.checking.mutation import unneeded_barriers
from tests.metal_harness.checking.proof import prove

import mlx.core as mx

# Half a unit in the last place of the output, and another order of summation.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2**-10, mx.bfloat16: 2**-7}


def exact(x, update, weight, eps):
    """The results in float32, rounded where the kernel stores."""
    stream = (x.astype(mx.float32) + update.astype(mx.float32)).astype(x.dtype)
    h, u = stream.astype(mx.float32), update.astype(mx.float32)
    squares = mx.stack([mx.square(state).sum(-1) for state in (u, h)])
    normed = h * mx.rsqrt(squares[1][..., None] / x.shape[-1] + eps) * weight.astype(mx.float32)
    return stream, normed.astype(x.dtype), squares


def prove_shape(dim, dtype, batch=1, length=1, scale=1.0):
    keys = mx.random.split(mx.random.key(dim), 3)
    x, update = ((scale * mx.random.normal((batch, length, dim), key=key)).astype(dtype) for key in keys[:2])
    weight = mx.random.normal((dim,), key=keys[2]).astype(dtype)
    return prove(
        *(add_rms_norm.fused, exact, x, update, weight, 1e-5),
        atol=1e-6 * scale,
        rtol=TOLERANCE[dtype],
        reads_once=["x", "update"],
    )


@pytest.mark.parametrize(("dim", "dtype"), list(zip([8, 100, 132, 576, 2048, 4096, 576, 576], cycle(TOLERANCE))))
def test_every_width(dim, dtype):
    report = prove_shape(dim, dtype, batch=2, length=3)
    traffic = report.dispatches[0].traffic
    assert traffic["weight"].group_read == 6 * dim * dtype.size  # once a row
    assert traffic["stream"].written == traffic["normed"].written == 6 * dim * dtype.size


def test_several_rounds():
    """Rows of more than 4096 numbers: a thread takes several groups, and some threads have none in the last round."""
    report = prove_shape(8196, mx.bfloat16)
    assert report.dispatches[0].checked.threadgroup_bytes <= 256


@pytest.mark.parametrize("scale", [1e-4, 100.0])
def test_small_and_large_numbers(scale):
    prove_shape(576, mx.float32, scale=scale)


def test_every_barrier_is_needed():
    assert unneeded_barriers([checked.dispatch for checked in prove_shape(576, mx.float32).dispatches]) == []
