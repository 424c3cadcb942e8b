"""Attention for the CPU, of one position and of a prompt, against float64 and MLX's own function."""

import threading

import numpy as np
import pytest
from cpu_only import cpu_only

from mlx_llama3.model.layers import tiled_linear
from mlx_llama3.model.layers.attention import fitting_chunk, scaled_dot_product_attention

import mlx.core as mx


@pytest.fixture(params=[1, 2, 3, 8])
def cores(request, monkeypatch):
    monkeypatch.setattr(tiled_linear, "n_cpu_streams", lambda: request.param)
    monkeypatch.setattr(tiled_linear, "_local", threading.local())
    return request.param


def inputs(batch: int, n_heads: int, n_kv_heads: int, new: int, length: int) -> list[mx.array]:
    rng = np.random.default_rng(length)
    kv_shape = (batch, n_kv_heads, length + 9, 32)  # a larger buffer, as in a cache
    q, keys, values = (rng.normal(size=shape) for shape in ((batch, n_heads, new, 32), kv_shape, kv_shape))
    q, keys, values = (mx.array(x.astype(np.float32)) for x in (q, keys, values))
    return [q, keys[:, :, :length], values[:, :, :length]]


def in_float64(q: mx.array, keys: mx.array, values: mx.array, scale: float, *, causal: bool = False) -> np.ndarray:
    q, keys, values = (np.array(x).astype(np.float64) for x in (q, keys, values))
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat(group, 1), values.repeat(group, 1)
    weights = np.exp(scale * q @ keys.swapaxes(-1, -2))
    if causal:
        new, length = q.shape[2], keys.shape[2]
        weights = weights * (np.arange(length) <= np.arange(length - new, length)[:, None])
    return weights / weights.sum(-1, keepdims=True) @ values


@pytest.mark.parametrize("length", [1, 64, 511, 512, 1000, 4100])
@pytest.mark.parametrize(("batch", "n_heads", "n_kv_heads"), [(1, 9, 3), (1, 8, 1), (2, 4, 4), (3, 16, 8)])
def test_one_position(cores, batch, n_heads, n_kv_heads, length):
    given = inputs(batch, n_heads, n_kv_heads, 1, length)
    out = scaled_dot_product_attention(*given, 0.3, None)
    assert out.shape == (batch, n_heads, 1, 32)
    np.testing.assert_allclose(np.array(out), in_float64(*given, 0.3), atol=2e-6)


def test_large_scores_do_not_overflow():
    q, keys, values = inputs(1, 4, 2, 1, 4100)
    keys[:, :, 7] = q[:, ::2, 0] * 100  # for every second head, this key gets all the weight
    out = scaled_dot_product_attention(q, keys, values, 10.0, None)
    np.testing.assert_allclose(np.array(out)[:, ::2, 0], np.array(values[:, :, 7]), atol=1e-6)
    assert np.isfinite(np.array(out)).all()


@pytest.mark.parametrize("mask", ["causal", "array"])
def test_other_masks_and_dtypes_use_mlx(mask):
    given = inputs(1, 4, 2, 5, 12)
    mask = mx.arange(12) <= mx.arange(7, 12)[:, None] if mask == "array" else mask
    expected = mx.fast.scaled_dot_product_attention(*given, scale=0.3, mask=mask)
    np.testing.assert_allclose(np.array(scaled_dot_product_attention(*given, 0.3, mask)), np.array(expected), atol=1e-6)
    half = [x.astype(mx.float16) for x in inputs(1, 4, 2, 1, 12)]
    assert scaled_dot_product_attention(*half, 0.3, None).dtype == mx.float16


def test_a_mask_for_one_position():
    q, keys, values = inputs(1, 4, 2, 1, 12)
    out = scaled_dot_product_attention(q, keys, values, 0.3, mx.arange(12) < 5)
    np.testing.assert_allclose(np.array(out), in_float64(q, keys[:, :, :5], values[:, :, :5], 0.3), atol=2e-6)


@pytest.mark.parametrize(("new", "length"), [(16, 16), (64, 64), (65, 300), (200, 201), (130, 1000)])
@pytest.mark.parametrize(("batch", "n_heads", "n_kv_heads"), [(1, 9, 3), (2, 4, 4)])
def test_a_prompt(cores, batch, n_heads, n_kv_heads, new, length):
    given = inputs(batch, n_heads, n_kv_heads, new, length)
    out = scaled_dot_product_attention(*given, 0.3, "causal")
    assert out.shape == (batch, n_heads, new, 32)
    np.testing.assert_allclose(np.array(out), in_float64(*given, 0.3, causal=True), atol=3e-6)


@cpu_only
def test_a_chunk_is_shorter_where_the_scores_would_not_fit():
    assert fitting_chunk(512, 1000, 9) == 512
    assert fitting_chunk(512, 8192, 32) == 128
    assert fitting_chunk(512, 131072, 128) == 32
    assert fitting_chunk(7, 131072, 128) == 7
    assert fitting_chunk(512, 0, 32) == 512


def test_a_gpu_never_stores_the_scores_of_a_chunk(monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
    assert fitting_chunk(512, 131072, 128) == 512
