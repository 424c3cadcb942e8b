"""The shipped Metal source of `add_rms_norm`, run on the CPU: values, bytes, races, barriers."""

from itertools import cycle

import numpy as np
import pytest
from correctly_rounded import double, prove_rounded

from mlx_llama3.model.kernels import add_rms_norm
from tests.metal_harness.checking.mutation import unneeded_barriers

import mlx.core as mx

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
RELATIVE = 6e-7  # of float32 arithmetic: the sum of the squares, the root, two products; measured 2e-7


def prove_shape(dim, dtype, batch=1, length=1, scale=1.0, eps=1e-5):
    keys = mx.random.split(mx.random.key(dim), 3)
    x, update = ((scale * mx.random.normal((batch, length, dim), key=key)).astype(dtype) for key in keys[:2])
    weight = mx.random.normal((dim,), key=keys[2]).astype(dtype)
    h = double((x.astype(mx.float32) + update.astype(mx.float32)).astype(dtype))  # rounded, as later layers read it
    squares = np.square([double(update), h]).sum(-1)
    normed = h / np.sqrt(squares[1][..., None] / dim + eps) * double(weight)
    exact = (h, normed, squares)
    return prove_rounded(
        *(add_rms_norm.fused, add_rms_norm.reference, x, update, weight, eps),
        exact=exact,
        errors=(1e-30, RELATIVE * np.abs(normed) + 1e-30, RELATIVE * squares),
        reads_once=["x", "update"],
    )


@pytest.mark.parametrize(("dim", "dtype"), list(zip([8, 100, 132, 576, 2048, 4096, 576, 576], cycle(DTYPES))))
def test_every_width(dim, dtype):
    report = prove_shape(dim, dtype, batch=2, length=3)
    traffic = report.dispatches[0].traffic
    assert traffic["weight"].group_read == 6 * dim * dtype.size  # once a row
    assert traffic["stream"].written == traffic["normed"].written == 6 * dim * dtype.size


def test_fewest_elements():
    """The narrowest rows have the 8 elements from which on MLX gives an input as `device`, also if there is one row."""
    (proven,) = prove_shape(8, mx.float32).dispatches
    assert {(each.name, each.space) for each in proven.dispatch.kernel.buffers if each.const} == {
        ("x", "device"),
        ("update", "device"),
        ("weight", "device"),
    }


@pytest.mark.parametrize("dim", [8196, 32768])
def test_several_rounds(dim):
    """Rows of more than 4096 numbers: a thread takes several groups, and some threads have none in the last round."""
    report = prove_shape(dim, mx.bfloat16)
    assert report.dispatches[0].checked.threadgroup_bytes <= 256


@pytest.mark.parametrize("scale", [1e-4, 100.0])
def test_small_and_large_numbers(scale):
    prove_shape(576, mx.float32, scale=scale)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1.2345678e-3, 0.5])
def test_every_eps(eps):
    """Numbers so small that eps is a part of the sum that matters."""
    prove_shape(64, mx.float32, scale=eps**0.5, eps=eps)


def test_every_barrier_is_needed():
    assert unneeded_barriers([checked.dispatch for checked in prove_shape(576, mx.float32).dispatches]) == []
