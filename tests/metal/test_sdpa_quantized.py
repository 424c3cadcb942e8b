"""The shipped Metal source of `sdpa_quantized`, run on the CPU: values, bytes, races, barriers."""

from itertools import cycle

import numpy as np
import pytest
from correctly_rounded import assert_rounded, prove_rounded
from quantized_attention import attention64, inputs

from mlx_llama3.model.cache.quantized import QuantizedKVCache
from mlx_llama3.model.kernels import sdpa_quantized
from mlx_llama3.model.kernels.kernel_set import Rows
from mlx_llama3.model.kernels.kv_packing import PackedLayout, unpack
from tests.metal_harness.checking.mutation import unneeded_barriers
from tests.metal_harness.checking.proof import Report
from tests.metal_harness.emulator import emulated

import mlx.core as mx

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
ERROR = 1e-6  # of float32 scores, exponentials and sums, for values and scores of about 1; measured 2.5e-7


def proven(layout: PackedLayout, lengths: tuple[int, int], *, dtype=mx.float32, **shape: int) -> Report:
    """Prove the kernel for a shape, and check that each used input byte is read by exactly one threadgroup, and no
    unused one."""
    args = (*inputs(layout, lengths, dtype=dtype, **shape), lengths, layout.head_dim**-0.5, layout)
    exact = attention64(*args)
    report = prove_rounded(sdpa_quantized.fused, sdpa_quantized.reference, *args, exact=[exact], errors=[ERROR])
    heads = 2 * shape.get("B", 1)
    used = {
        "dense": 2 * heads * lengths[0] * layout.head_dim * dtype.size,
        "records": heads * lengths[1] * layout.words * 4,
    }
    for name, nbytes in used.items():
        traffic = report.dispatches[0].traffic[name]
        assert traffic.unique_read == traffic.group_read == nbytes
    return report


FORMS = cycle([(64, 4, mx.float32), (128, 4, mx.float16), (64, 8, mx.bfloat16), (128, 8, mx.float32)])


@pytest.mark.parametrize(("group", "form"), list(zip(range(1, 17), FORMS, strict=False)), ids=str)
def test_every_group_of_heads(group, form):
    """1 to 16 query heads for a KV head, over all head sizes, bits and dtypes."""
    head_dim, value_bits, dtype = form
    report = proven(PackedLayout(head_dim, value_bits), (9, 40 + 3 * group), group=group, dtype=dtype)
    assert len(report.dispatches) == 1


@pytest.mark.parametrize(
    ("lengths", "form"),
    list(zip([(1, 0), (2, 1), (1, 63), (65, 0), (40, 1), (7, 250), (130, 701), (1, 1022)], FORMS, strict=False)),
    ids=str,
)
def test_lengths_in_one_pass(lengths, form):
    """Only the new position dense, or all positions; fewer positions than one simdgroup takes, and many."""
    head_dim, value_bits, dtype = form
    assert len(proven(PackedLayout(head_dim, value_bits), lengths, group=3, dtype=dtype).dispatches) == 1


@pytest.mark.parametrize(
    ("head_dim", "lengths", "value_bits", "dtype", "group"),
    [
        (64, (1, 1023), 4, mx.float32, 4),
        (128, (96, 1500), 8, mx.bfloat16, 8),
        (128, (1100, 0), 4, mx.float32, 1),
        (64, (33, 4000), 4, mx.float16, 3),
        (128, (120, 2500), 4, mx.float16, 5),
    ],
    ids=str,
)
def test_two_passes(head_dim, lengths, value_bits, dtype, group):
    report = proven(PackedLayout(head_dim, value_bits), lengths, group=group, dtype=dtype)
    _, second = report.dispatches
    parts = second.traffic["parts"]
    rows = 2 * group
    assert parts.unique_read == parts.group_read == rows * sdpa_quantized._blocks(sum(lengths)) * 4 * (head_dim + 2)
    assert second.traffic["out"].unique_written == rows * head_dim * dtype.size


@pytest.mark.parametrize(
    ("S", "group", "lengths", "B"),
    [(2, 4, (2, 100), 1), (5, 3, (70, 40), 2), (6, 8, (8, 0), 1), (3, 16, (30, 1100), 1), (7, 1, (40, 9), 3)],
    ids=str,
)
def test_drafts_and_batches(S, group, lengths, B):
    """Several new positions attend causally to each other; the rows of a batch are independent."""
    proven(PackedLayout(64, 4), lengths, group=group, S=S, B=B)


def test_without_room_for_packed_positions_the_reference_runs():
    """MLX gives an input of under 8 elements to a kernel as `constant`, which this kernel does not compile with."""
    layout, lengths = PackedLayout(64, 4), (9, 0)
    q, dense, packed = inputs(layout, lengths)
    args = (q, dense, packed[:, :, :0], lengths, 0.125, layout)
    with emulated() as emulation:
        out = sdpa_quantized.fused(*args)
    assert_rounded([out], [attention64(q, dense, packed, *args[3:])], [ERROR])
    assert emulation.calls == {}


def test_fewest_elements():
    """One packed position is enough; the lengths are always 2 elements."""
    layout = PackedLayout(64, 4)
    q, dense, packed = inputs(layout, (1, 1))
    args = (q, dense, packed[:, :, :1], (1, 1), 0.125, layout)
    exact = attention64(*args)
    report = prove_rounded(sdpa_quantized.fused, sdpa_quantized.reference, *args, exact=[exact], errors=[ERROR])
    spaces = {each.name: each.space for each in report.dispatches[0].dispatch.kernel.buffers}
    assert [spaces[name] for name in ("q", "dense", "records", "lengths")] == ["device"] * 3 + ["constant"]


def test_a_mask_of_infinity_is_refused(monkeypatch):
    """`fast::exp2` of minus infinity need not be 0, so scores that are not seen are low but finite."""
    source = sdpa_quantized.ATTEND.replace("LOWEST = -3.0e38f", "LOWEST = -INFINITY")
    assert source != sdpa_quantized.ATTEND
    monkeypatch.setattr(sdpa_quantized, "ATTEND", source)
    try:
        with pytest.raises(AssertionError, match="right for finite numbers only"):
            proven(PackedLayout(64, 4), (5, 40), S=3)
    finally:
        sdpa_quantized._attend.cache_clear()


def test_random_shapes():
    random = np.random.default_rng(0)
    for form, _ in zip(FORMS, range(4), strict=False):
        S, group = int(random.integers(1, 9)), int(random.integers(1, 9))
        lengths = (int(random.integers(S, 160)), int(random.integers(0, 400)))
        B = int(random.integers(1, 3))
        proven(PackedLayout(*form[:2]), lengths, group=group, S=S, B=B, dtype=form[2])


def test_views_are_read_in_place():
    """Queries and caches that are slices of larger arrays: the kernel uses their strides and makes no copies."""
    layout, lengths = PackedLayout(64, 4), (20, 70)
    q, dense, packed = inputs(layout, lengths, group=3, S=2)
    wide = mx.concatenate([q, q + 1], axis=1).transpose(0, 2, 1, 3)
    wide = mx.contiguous(mx.repeat(wide, 2, axis=3))  # (B, S, heads, 2 * head_dim)
    views = (
        wide.transpose(0, 2, 1, 3)[:, :6, :, ::2],
        mx.tile(mx.concatenate([dense, dense + 1], axis=2), (1, 1, 1, 1, 2))[:, :, :2, :, :64],
        mx.concatenate([packed, packed], axis=3)[..., : layout.words],
    )
    exact = attention64(q, dense, packed, lengths, 0.125, layout)
    rest = (*views, lengths, 0.125, layout)
    prove_rounded(sdpa_quantized.fused, sdpa_quantized.reference, *rest, exact=[exact], errors=[ERROR])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(50, 300), (50, 1200)], ids=str)
def test_its_error_is_no_larger_than_that_of_what_it_replaces(dtype, lengths):
    """It replaces dequantizing to the model's dtype, followed by MLX's attention."""
    layout = PackedLayout(128, 4)
    q, dense, packed = inputs(layout, lengths, group=4, dtype=dtype)
    report = proven(layout, lengths, group=4, dtype=dtype)
    old = unpack(packed[:, :, : lengths[1]], layout, dtype)
    keys, values = (mx.concatenate([old[i], dense[i, :, :, : lengths[0]]], axis=2) for i in range(2))
    replaced = mx.fast.scaled_dot_product_attention(q, keys, values, scale=128**-0.5)
    expected = attention64(q, dense, packed, lengths, 128**-0.5, layout)
    errors = [np.abs(np.array(out.astype(mx.float32)) - expected).max() for out in (report.outputs[0], replaced)]
    assert errors[0] <= 1.1 * errors[1]  # in float32, both errors come from the order of summation


@pytest.mark.parametrize("lengths", [(40, 500), (40, 1500)], ids=["one pass", "two passes"])
def test_every_barrier_is_needed(lengths):
    report = proven(PackedLayout(64, 4), lengths, group=6)
    for checked in report.dispatches:
        assert unneeded_barriers([checked.dispatch]) == []


def test_a_cache_gives_the_same_with_and_without_the_kernel():
    """A prompt, a draft that is partly trimmed, and single positions past the end of a block and past 1,024."""
    layout = PackedLayout(64, 4)
    caches = [QuantizedKVCache(layout, fused=fused) for fused in (Rows.ALL, Rows.NONE)]
    kv, q = mx.random.normal((2, 1, 2, 1100, 64)), mx.random.normal((1, 6, 1100, 64))
    with emulated() as emulation:
        start, calls = 0, 0
        for length, accepted in ((150, 150), (5, 2), (1, 1), (860, 860), *[(1, 1)] * 12):
            part = slice(start, start + length)
            mask = "causal" if length > 1 else None
            outputs = [cache.attend(q[:, :, part], kv[:, :, :, part], 0.125, mask) for cache in caches]
            np.testing.assert_allclose(*map(np.array, outputs), atol=3e-6)
            for cache in caches:
                cache.trim(length - accepted)
            start += accepted
            calls += length <= 8
        assert emulation.called("llama3_sdpa_quantized_float") == calls
        assert emulation.called("llama3_sdpa_quantized_reduce") == start - 1023
    for ours, expected in zip(*(cache.fetch() for cache in caches), strict=True):
        np.testing.assert_array_equal(np.array(ours), np.array(expected))
