"""The shipped Metal source of `norm_rope_qkv`, run on the CPU: values, bytes, races."""

from itertools import cycle

import numpy as np
import pytest
from correctly_rounded import prove_rounded
from quantized_product import NORM, RELATIVE, normed_product64, packed_linear, stream_inputs

from mlx_llama3.model.kernels import norm_rope_qkv
from mlx_llama3.model.layers.rope import RopeTables

import mlx.core as mx

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def rotated(product, error, n_heads, n_kv_heads, freqs):
    """Queries, keys and values in float64 with float32 angles, as in the kernel; and their errors."""
    B, S, _ = product.shape
    offset = np.broadcast_to(np.array(freqs.offset), (B,))
    angle = (offset[:, None] + np.arange(S)).astype(np.float32)[..., None] * np.array(freqs.inv_freq)  # (B, S, pairs)
    sine, cosine = (function(angle.astype(np.float64))[:, None] for function in (np.sin, np.cos))

    def halves(values):
        return np.split(values.reshape(B, S, n_heads + 2 * n_kv_heads, -1).transpose(0, 2, 1, 3), 2, axis=-1)

    (low, high), (low_error, high_error) = halves(product), halves(error)
    turned = np.concatenate([low * cosine - high * sine, low * sine + high * cosine], axis=-1)
    turned_error = np.tile(low_error + high_error + RELATIVE * (np.abs(low) + np.abs(high)), 2)
    plain, plain_error = np.concatenate([low, high], axis=-1), np.concatenate([low_error, high_error], axis=-1)
    q, k, v = slice(n_heads), slice(n_heads, n_heads + n_kv_heads), slice(n_heads + n_kv_heads, None)
    exact = turned[:, q], np.stack([turned[:, k], plain[:, v]])
    return exact, (turned_error[:, q], np.stack([turned_error[:, k], plain_error[:, v]]))


def prove_shape(heads, head_dim, dtype, dim=64, form=(4, 32), start_pos=7, batch=1, length=1, scale=1.0, eps=1e-5):
    n_heads, n_kv_heads = heads
    widths = [count * head_dim for count in (n_heads, n_kv_heads, n_kv_heads)]
    wqkv = packed_linear(dim, widths, *form, dtype, mx.random.key(sum(widths) + dim))
    x, update, weight = stream_inputs(dim, dtype, batch, length, scale)
    inv_freq = 500000.0 ** (-mx.arange(0, head_dim, 2, dtype=mx.float32) / head_dim)
    offset = start_pos if isinstance(start_pos, mx.array) else mx.array(start_pos)
    freqs = RopeTables(offset, inv_freq, 1.0 / inv_freq)
    stream, squares, product, error = normed_product64(x, update, weight, eps, wqkv)
    (q, kv), (q_error, kv_error) = rotated(product, error, n_heads, n_kv_heads, freqs)

    def flat(function):
        """The outputs in a row; `prove` compares arrays."""

        def call(*args):
            stream, (q, kv), squares = function(*args)
            return stream, q, kv, squares

        call.__module__ = function.__module__  # where `prove` empties the caches
        return call

    kernel, reference = flat(norm_rope_qkv.fused), flat(norm_rope_qkv.reference)
    return prove_rounded(
        *(kernel, reference, x, update, weight, eps, wqkv, n_heads, n_kv_heads, start_pos, freqs),
        exact=(stream, q, kv, squares),
        errors=(1e-30, q_error + 1e-30, kv_error + 1e-30, NORM * squares),
        reads_once=["w", "scales", "biases"],
    )


FORMATS = [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128), (4, 64)]


@pytest.mark.parametrize(("form", "dtype"), list(zip(FORMATS, cycle(DTYPES))), ids=str)
def test_every_format(form, dtype):
    (dispatch,) = prove_shape((2, 1), 8, dtype, 640, form).dispatches
    assert dispatch.checked.threadgroup_bytes == 0
    traffic = dispatch.traffic
    assert traffic["stream"].written == 640 * dtype.size
    assert traffic["q"].written == traffic["kv"].written == 16 * dtype.size


SHAPES = [((9, 3), 64), ((8, 2), 128), ((1, 1), 8), ((2, 1), 4), ((2, 1), 12)]


@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES, cycle(DTYPES))), ids=str)
def test_every_shape_of_heads(shape, dtype):
    prove_shape(*shape, dtype)


@pytest.mark.parametrize("dim", [32, 96, 576, 2048])
def test_every_width(dim):
    """Rows shorter than what a simdgroup reads at a time, and rows that are no multiple of it."""
    prove_shape((2, 1), 8, mx.float32, dim)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_16_bits_are_rounded_once(dtype):
    prove_shape((6, 2), 64, dtype, 512)


@pytest.mark.parametrize("start_pos", [0, 1, 8191, 131071])
def test_positions(start_pos):
    """Also far positions, where an imprecise sine is noise."""
    prove_shape((4, 2), 64, mx.float32, start_pos=start_pos)


@pytest.mark.parametrize("scale", [1e-4, 100.0])
def test_small_and_large_streams(scale):
    prove_shape((2, 1), 8, mx.float32, 576, scale=scale)


@pytest.mark.parametrize("eps", [1e-6, 1.2345678e-3, 0.5])
def test_every_eps(eps):
    prove_shape((2, 1), 8, mx.float32, scale=eps**0.5, eps=eps)


@pytest.mark.parametrize(("batch", "length"), [(1, 3), (2, 1), (2, 2)])
def test_several_positions_and_sequences(batch, length):
    prove_shape((4, 2), 16, mx.float32, 96, start_pos=100, batch=batch, length=length)


def test_sequences_with_different_start_positions():
    prove_shape((4, 2), 16, mx.float16, start_pos=mx.array([3, 1000]), batch=2, length=2)
