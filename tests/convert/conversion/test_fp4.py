"""FP4 on the CPU has the bits of `mx.quantize`, for all kinds of values, and is taken for all but the farthest."""

import numpy as np
import pytest
from cpu_only import cpu_only

from convert.conversion import fp4

import mlx.core as mx

FORMATS = pytest.mark.parametrize(("mode", "group_size"), [("mxfp4", 32), ("nvfp4", 16)])
DTYPES = pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])


def equal(values: mx.array, mode: str, group_size: int) -> bool:
    settings = {"group_size": group_size, "bits": 4, "mode": mode}
    ours, theirs = fp4.quantize(values, **settings), mx.quantize(values, **settings)
    same = [mx.array_equal(a, b).item() and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True)]
    return all(same)


def random(dtype: mx.Dtype, spread: int, seed: int = 0) -> mx.array:
    """Normal values whose rows differ in size by up to 2**spread in each direction; finite."""
    generator = np.random.default_rng(seed)
    values = np.ldexp(generator.normal(size=(256, 128)), generator.integers(-spread, spread + 1, (256, 1)))
    largest = float(mx.finfo(dtype).max)
    return mx.array(values.clip(-largest, largest).astype(np.float32)).astype(dtype)


@cpu_only
@FORMATS
@DTYPES
@pytest.mark.parametrize("spread", [0, 5, 14, 60, 126])
def test_random_values_of_all_sizes(mode, group_size, dtype, spread):
    assert equal(random(dtype, spread), mode, group_size)


@cpu_only
@FORMATS
@DTYPES
def test_midpoints_their_neighbours_zeros_and_the_ends_of_a_dtype(mode, group_size, dtype):
    grid = np.array([0.0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6], np.float32)
    near = np.concatenate(
        [grid, np.nextafter(grid, np.float32(9)), np.nextafter(grid, np.float32(-9)), grid * 1.0078125]
    )
    values = np.concatenate([near, -near])
    rows = [np.concatenate([[6.0], values, np.zeros(7)]).astype(np.float32)]
    rows += [rows[0] * np.float32(factor) for factor in (2.0**-10, 3.0, 0.37)]
    rows += [np.zeros(128, np.float32), np.full(128, -0.0, np.float32)]
    largest = float(mx.finfo(dtype).max)
    rows += [np.full(128, value, np.float32) for value in (6e-8, 1e-40, largest, -largest, 1e-38, 2.0**-126, 1e-30)]
    assert equal(mx.array(np.stack([row[:128] for row in rows])).astype(dtype), mode, group_size)


@cpu_only
@FORMATS
@DTYPES
def test_every_number_of_16_bits(mode, group_size, dtype):
    """Each beside a 6, which sets the scale of its group."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = mx.array(bits).view(mx.bfloat16 if dtype == mx.float32 else dtype).astype(mx.float32)
    values = mx.where(mx.abs(values) <= 6, values, mx.array(6.0)).reshape(-1, 1)
    rows = mx.concatenate([values, mx.full((1 << 16, 1), 6.0), mx.zeros((1 << 16, 30))], axis=1)
    assert equal(rows.astype(dtype), mode, group_size)


@cpu_only
@FORMATS
def test_mlx_is_asked_only_for_what_is_far_away(mode, group_size, monkeypatch):
    settings = {"group_size": group_size, "bits": 4, "mode": mode}
    far = mx.full((4, 32), 1e30)
    asked = []
    first = mx.quantize
    monkeypatch.setattr(mx, "quantize", lambda *args, **options: asked.append(1) or first(*args, **options))
    fp4.quantize(random(mx.bfloat16, 3), **settings)
    assert not asked
    fp4.quantize(far, **settings)
    assert len(asked) == (mode == "nvfp4")


@cpu_only
def test_other_formats_are_those_of_mlx():
    values = random(mx.float16, 3)
    for settings in ({"group_size": 64, "bits": 4, "mode": "affine"}, {"group_size": 32, "bits": 8, "mode": "mxfp8"}):
        pairs = zip(fp4.quantize(values, **settings), mx.quantize(values, **settings), strict=True)
        assert all(mx.array_equal(ours, theirs).item() for ours, theirs in pairs)
