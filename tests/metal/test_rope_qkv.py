"""The shipped Metal source of `rope_qkv`, run on the CPU: values, bytes, races."""

from itertools import cycle

import numpy as np
import pytest
from correctly_rounded import double, prove_rounded

from mlx_llama3.model.kernels import rope_qkv
from mlx_llama3.model.layers.rope import RopeTables

import mlx.core as mx

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
RELATIVE = 2e-7  # of float32 sines and products, relative to |low| + |high|; measured 6e-8


def exact(qkv, n_heads, n_kv_heads, freqs):
    """The results with float32 angles, as in the kernel, and float64 sines and products; and the allowed errors."""
    B, S, _ = qkv.shape
    offset = np.broadcast_to(np.array(freqs.offset), (B,))
    angle = (offset[:, None] + np.arange(S)).astype(np.float32)[..., None] * np.array(freqs.inv_freq)  # (B, S, pairs)
    sine, cosine = (function(angle.astype(np.float64))[:, None] for function in (np.sin, np.cos))
    heads = double(qkv).reshape(B, S, n_heads + 2 * n_kv_heads, -1)
    low, high = np.split(heads.transpose(0, 2, 1, 3), 2, axis=-1)  # (B, heads, S, pairs)
    rotated = np.concatenate([low * cosine - high * sine, low * sine + high * cosine], axis=-1)
    plain = np.concatenate([low, high], axis=-1)
    error = RELATIVE * np.tile(np.abs(low) + np.abs(high), 2)
    q, k, v = rotated[:, :n_heads], rotated[:, n_heads : n_heads + n_kv_heads], plain[:, n_heads + n_kv_heads :]
    q_error, k_error = error[:, :n_heads], error[:, n_heads : n_heads + n_kv_heads]
    return (q, np.stack([k, v])), (q_error, np.stack([k_error, np.full(v.shape, 1e-30)]))


def prove_shape(heads, head_dim, dtype, start_pos=7, batch=1, length=1):
    n_heads, n_kv_heads = heads
    width = (n_heads + 2 * n_kv_heads) * head_dim
    qkv = mx.random.normal((batch, length, width), key=mx.random.key(width)).astype(dtype)
    inv_freq = 500000.0 ** (-mx.arange(0, head_dim, 2, dtype=mx.float32) / head_dim)
    offset = start_pos if isinstance(start_pos, mx.array) else mx.array(start_pos)
    freqs = RopeTables(offset, inv_freq, 1.0 / inv_freq)
    results, errors = exact(qkv, n_heads, n_kv_heads, freqs)
    return prove_rounded(
        *(rope_qkv.fused, rope_qkv.reference, qkv, n_heads, n_kv_heads, start_pos, freqs),
        exact=results,
        errors=errors,
        reads_once=["qkv"],
    )


SHAPES = [((9, 3), 64), ((32, 8), 64), ((24, 8), 128), ((1, 1), 8), ((3, 1), 6), ((2, 1), 64)]


@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES, cycle(DTYPES))), ids=str)
def test_every_shape_of_heads(shape, dtype):
    (dispatch,) = prove_shape(*shape, dtype).dispatches
    traffic = dispatch.traffic
    assert traffic["q"].written + traffic["kv"].written == traffic["qkv"].size


FAR = [(0, mx.float32), (1, mx.float32), (8191, mx.bfloat16), (65521, mx.float16), (131071, mx.float32)]


@pytest.mark.parametrize(("start_pos", "dtype"), FAR, ids=str)
def test_positions(start_pos, dtype):
    """Also far positions, where an imprecise sine is noise, and which 16-bit dtypes do not hold."""
    prove_shape((4, 2), 64, dtype, start_pos)


@pytest.mark.parametrize(("batch", "length"), [(1, 5), (2, 1), (3, 4)])
def test_several_positions_and_sequences(batch, length):
    prove_shape((4, 2), 64, mx.float32, 100, batch, length)


def test_sequences_with_different_start_positions():
    prove_shape((4, 2), 64, mx.float16, mx.array([3, 1000, 0]), 3, 2)


def spaces(report) -> dict[str, tuple[str, bool]]:
    """How the one kernel gets its inputs: (address space, whether as one value)."""
    (proven,) = report.dispatches
    return {each.name: (each.space, each.reference) for each in proven.dispatch.kernel.buffers if each.const}


@pytest.mark.parametrize(
    ("pairs", "batch", "qkv", "inverse", "offset"),
    [
        (1, 1, "constant", "constant", "constant"),
        (1, 2, "device", "constant", "constant"),
        (7, 7, "device", "constant", "constant"),
        (8, 8, "device", "device", "device"),
    ],
)
def test_few_elements(pairs, batch, qkv, inverse, offset):
    """MLX gives an input of under 8 elements to a kernel as `constant`."""
    report = prove_shape((1, 1), 2 * pairs, mx.float32, mx.arange(3, 3 + batch), batch)
    assert spaces(report)["qkv"] == (qkv, False)
    assert spaces(report)["inverse"] == (inverse, False)
    assert spaces(report)["offset"] == (offset, False)


def test_one_offset_is_no_array():
    assert spaces(prove_shape((2, 1), 16, mx.float32))["offset"] == ("constant", True)


@pytest.mark.parametrize("head_dim", [rope_qkv.MAX_HEAD_DIM, 512])
def test_wide_heads(head_dim):
    """A threadgroup is as wide as half a head, up to the 1,024 threads that Metal allows."""
    (dispatch,) = prove_shape((2, 1), head_dim, mx.float16).dispatches
    assert dispatch.dispatch.threadgroup == (head_dim // 2, 1, 1)


def test_threadgroups_are_full():
    """256 threads: as many groups of heads as fit beside each other."""
    (dispatch,) = prove_shape((32, 8), 64, mx.bfloat16).dispatches
    assert dispatch.dispatch.threadgroup == (32, 8, 1)
