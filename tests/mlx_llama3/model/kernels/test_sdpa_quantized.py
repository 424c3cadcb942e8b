"""Attention over packed positions: the reference against float64, and which inputs the kernel takes.

`tests/metal/test_sdpa_quantized.py` runs the kernel itself.
"""

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


def taken(group=2, S=1, head_dim=64, *, n_heads=None, dtypes=(mx.float32, mx.float32), layout=None) -> bool:
    """Whether it takes arrays of these shapes, which are never evaluated; 2 KV heads, queries and dense in `dtypes`."""
    q = mx.zeros((1, n_heads or 2 * group, S, head_dim), dtypes[0])
    dense = mx.zeros((2, 1, 2, 8 + S, head_dim), dtypes[1])
    layout = layout or PackedLayout(head_dim, 4)
    return sdpa_quantized.takes(q, dense, mx.zeros((1, 2, 8, layout.words), mx.uint32), layout)


@pytest.mark.parametrize(
    ("yes", "no"),
    [
        ({"group": 16}, {"group": 17}),
        ({"group": 16, "S": 3}, {"group": 16, "S": 4}),
        ({"group": 8, "S": 6}, {"group": 7, "S": 7}),
        ({"head_dim": 128}, {"head_dim": 192}),
        ({"n_heads": 6}, {"n_heads": 5}),
        ({"layout": PackedLayout(64, 8)}, {"layout": PackedLayout(128, 4)}),
        ({"dtypes": (mx.bfloat16, mx.bfloat16)}, {"dtypes": (mx.float16, mx.float32)}),
        ({"dtypes": (mx.float16, mx.float16)}, {"dtypes": (mx.int32, mx.int32)}),
    ],
    ids=str,
)
def test_which_shapes_and_dtypes_it_takes(yes, no):
    assert taken(**yes)
    assert not taken(**no)


def test_the_reference_runs_for_inputs_that_the_kernel_does_not_take():
    """Heads of 192: the same bits as the reference. There is no Metal here, so a call of the kernel would raise."""
    layout, lengths = PackedLayout(192, 8), (9, 20)
    arrays = inputs(layout, lengths)
    results = [attend(*arrays, lengths, 0.1, layout) for attend in (sdpa_quantized.fused, sdpa_quantized.reference)]
    np.testing.assert_array_equal(*map(np.array, results))
