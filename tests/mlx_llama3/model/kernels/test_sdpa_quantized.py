"""Attention over packed positions: the reference against float64, and which inputs the kernel takes.

`tests/metal/test_sdpa_quantized.py` runs the kernel itself.
"""

from collections.abc import Callable

import numpy as np
import pytest
from quantized_attention import attention64, inputs

from mlx_llama3.model.kernels import sdpa_quantized
from mlx_llama3.model.kernels.kv_packing import PackedLayout

import mlx.core as mx


@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("value_bits", [4, 8])
@pytest.mark.parametrize("lengths", [(1, 0), (40, 0), (5, 1), (100, 300)], ids=str)
@pytest.mark.parametrize(("group", "S", "B"), [(1, 1, 1), (3, 1, 2), (4, 5, 1), (16, 1, 1)])
def test_reference_against_float64(head_dim, value_bits, lengths, group, S, B):
    layout = PackedLayout(head_dim, value_bits)
    lengths = (max(S, lengths[0]), lengths[1])
    arrays = inputs(layout, lengths, group=group, S=S, B=B)
    out = sdpa_quantized.reference(*arrays, lengths, head_dim**-0.5, layout)
    assert out.shape == arrays[0].shape and out.dtype == mx.float32
    np.testing.assert_allclose(np.array(out), attention64(*arrays, lengths, head_dim**-0.5, layout), atol=3e-6)


@pytest.mark.parametrize(("dtype", "unit"), [(mx.float16, 2**-11), (mx.bfloat16, 2**-8)], ids=str)
def test_reference_rounds_only_its_output(dtype, unit):
    layout, lengths = PackedLayout(64, 4), (50, 200)
    arrays = inputs(layout, lengths, dtype=dtype)
    out = sdpa_quantized.reference(*arrays, lengths, 0.125, layout)
    assert out.dtype == dtype
    expected = attention64(*arrays, lengths, 0.125, layout)
    np.testing.assert_allclose(np.array(out.astype(mx.float32)), expected, rtol=unit, atol=1e-5)


def refused(change: Callable[[dict], dict]) -> bool:
    layout = PackedLayout(64, 4)
    q, dense, packed = inputs(layout, (8, 8))
    given = {"q": q, "dense": dense, "packed": packed, "layout": layout}
    assert sdpa_quantized.takes(**given)
    return not sdpa_quantized.takes(**(given | change(given)))


def test_which_dtypes_and_sizes_it_takes():
    layout = PackedLayout(192, 4)
    assert refused(lambda given: {"q": given["q"].astype(mx.float16)})
    assert refused(lambda given: {name: given[name].astype(mx.int32) for name in ("q", "dense")})
    assert refused(
        lambda _: dict(zip(("q", "dense", "packed"), inputs(layout, (8, 8)), strict=True)) | {"layout": layout}
    )
    for group, S in ((17, 1), (16, 4), (8, 7)):
        assert refused(lambda given, size=(1, 2 * group, S, 64): {"q": mx.zeros(size)})
    assert refused(lambda given: {"q": mx.zeros((1, 5, 1, 64))})


def test_the_reference_runs_for_inputs_that_the_kernel_does_not_take():
    """Heads of 192: the same bits as the reference. There is no Metal here, so a call of the kernel would raise."""
    layout, lengths = PackedLayout(192, 8), (9, 20)
    arrays = inputs(layout, lengths)
    results = [attend(*arrays, lengths, 0.1, layout) for attend in (sdpa_quantized.fused, sdpa_quantized.reference)]
    np.testing.assert_array_equal(*map(np.array, results))
