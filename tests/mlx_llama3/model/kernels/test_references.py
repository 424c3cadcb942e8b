"""The references of the fused kernels against float64."""

import numpy as np
import pytest
from quantized_product import normed_product64, stream_inputs, swiglu64

from mlx_llama3.model.kernels import add_rms_norm, norm_rope_qkv, norm_swiglu_qmv, rope_qkv, swiglu_qmv
from mlx_llama3.model.layers.packed_linear import PackedLinear
from mlx_llama3.model.layers.rope import RopeTables

import mlx.core as mx
import mlx.nn as nn


def double(x):
    return np.array(x.astype(mx.float32), np.float64)


def normal(*shape, seed=0, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def freqs(offset, head_dim=8):
    inv_freq = 10000.0 ** (-mx.arange(0, head_dim, 2, dtype=mx.float32) / head_dim)
    return RopeTables(mx.array(offset), inv_freq, 1.0 / inv_freq)


def packed(bits=4, group=32, dim=64, hidden=8, mode="affine", dtype=mx.float32):
    parts = [nn.QuantizedLinear(dim, hidden, bias=False, group_size=group, bits=bits, mode=mode) for _ in range(2)]
    for part in parts:
        part.scales = part.scales.astype(dtype) if mode == "affine" else part.scales
        part.biases = part.biases.astype(dtype) if mode == "affine" else None
    return PackedLinear(parts)


def test_add_rms_norm():
    x, update, weight = normal(2, 3, 64), normal(2, 3, 64, seed=1), normal(64, seed=2)
    stream, normed, squares = map(double, add_rms_norm.reference(x, update, weight, 1e-5))
    h = double(x) + double(update)
    np.testing.assert_allclose(stream, h, atol=1e-6)
    expected = h / np.sqrt(np.square(h).mean(-1, keepdims=True) + 1e-5) * double(weight)
    np.testing.assert_allclose(normed, expected, atol=1e-5)
    np.testing.assert_allclose(squares, [np.square(double(update)).sum(-1), np.square(h).sum(-1)], rtol=1e-5)


@pytest.mark.parametrize("offset", [7, [3, 900]])
def test_rope_qkv(offset):
    B, S, n_heads, n_kv_heads = 2, 3, 4, 2
    qkv, tables = normal(B, S, 64), freqs(offset)
    start = tables.offset if isinstance(offset, list) else offset
    q, kv = map(double, rope_qkv.reference(qkv, n_heads, n_kv_heads, start, tables))
    assert q.shape == (B, n_heads, S, 8) and kv.shape == (2, B, n_kv_heads, S, 8)
    heads = double(qkv).reshape(B, S, 8, 8).transpose(0, 2, 1, 3)
    positions = np.broadcast_to(np.array(offset), (B,))[:, None] + np.arange(S)
    rotation = np.exp(1j * positions[:, None, :, None] * double(tables.inv_freq))
    rotated = (heads[..., :4] + 1j * heads[..., 4:]) * rotation
    rotated = np.concatenate([rotated.real, rotated.imag], axis=-1)
    np.testing.assert_allclose(q, rotated[:, :4], atol=1e-3)
    np.testing.assert_allclose(kv, [rotated[:, 4:6], heads[:, 6:]], atol=1e-3)


def test_products_with_the_norm():
    """The stream, its squared norms, and what the other references make of its norm."""
    x, update, weight = stream_inputs(64, mx.float32, 2, 2)
    w13, wqkv = packed(), packed(hidden=32)
    stream, squares, product, _ = normed_product64(x, update, weight, 1e-5, w13)
    outputs = norm_swiglu_qmv.reference(x, update, weight, 1e-5, w13)
    expected = (stream, swiglu64(product, product)[0], squares)
    for output, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(double(output), wanted, atol=1e-5 * np.abs(wanted).max())

    stream, squares, product, _ = normed_product64(x, update, weight, 1e-5, wqkv)
    heads = 4, 2, 7, freqs(7)
    h, (q, kv), norms = norm_rope_qkv.reference(x, update, weight, 1e-5, wqkv, *heads)
    wanted_q, wanted_kv = rope_qkv.reference(mx.array(product.astype(np.float32)), *heads)
    for output, wanted in ((h, stream), (q, double(wanted_q)), (kv, double(wanted_kv)), (norms, squares)):
        np.testing.assert_allclose(double(output), wanted, atol=1e-5 * np.abs(wanted).max())


def test_swiglu_qmv():
    w13, x = packed(), normal(1, 2, 64)
    matrix = w13.parts[0]
    dense = double(mx.dequantize(matrix.weight, matrix.scales, matrix.biases, group_size=32, bits=4))
    gate, up = np.split(double(x) @ dense.T, 2, axis=-1)
    np.testing.assert_allclose(double(swiglu_qmv.reference(w13, x)), gate / (1 + np.exp(-gate)) * up, atol=1e-5)
