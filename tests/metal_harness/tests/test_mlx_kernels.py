"""The harness on kernels that are known to be right: MLX's own. They must return what float64 arithmetic gives."""

import numpy as np
import pytest

from tests.metal_harness.executor import launch
from tests.metal_harness.mlx_kernels import mlx_kernel

import mlx.core as mx

# What is stored in the type of the inputs may be off by half a unit in its last place.
TYPES = {"float": (np.float32, 1e-5), "float16_t": (np.float16, 1e-3)}
ORDERS = ["forward", "reverse", 3]
# Of batched products, of masks and of attention sinks.
UNUSED = ["x_batch_ndims", "x_shape", "x_strides", "w_batch_ndims", "w_shape", "w_strides", "s_strides", "b_strides"]
UNUSED += ["bmask", "fmask", "mask_kv_seq_stride", "mask_q_seq_stride", "mask_head_stride", "sinks", "num_q_heads"]


def run(kernel, buffers, groups, threads, order="forward"):
    """Launch `groups` threadgroups of `threads` each; `buffers` by name, without those that this use does not read."""
    unused = {name for name in UNUSED if name not in buffers}
    given = [np.asarray(0 if each.name in unused else buffers[each.name]) for each in kernel.buffers]
    grid = tuple(group * thread for group, thread in zip(groups, threads, strict=True))
    launch(kernel, given, grid, threads, order)


def quantized(rng, rows, columns, group_size, bits):
    """A matrix as MLX packs it, and its values in float64."""
    matrix = mx.array(rng.normal(size=(rows, columns)).astype(np.float32))
    packed, scales, biases = mx.quantize(matrix, group_size=group_size, bits=bits)
    values = np.array(mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits), np.float64)
    return np.array(packed), np.array(scales), np.array(biases), values


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 64), (4, 128), (8, 64), (3, 64), (6, 32)])
@pytest.mark.parametrize("order", ORDERS)
def test_quantized_matvec(bits, group_size, order):
    rng = np.random.default_rng(bits)
    rows, columns = 24, 1024
    w, scales, biases, values = quantized(rng, rows, columns, group_size, bits)
    x = rng.normal(size=(2, columns)).astype(np.float32)
    template = {"T": "float", "group_size": group_size, "bits": bits, "batched": "false", "partial_rows": "false"}
    template |= {"has_global_scale": "false", "results_per_simdgroup": 4}
    kernel = mlx_kernel("quantized.h", "affine_qmv_fast", template)
    y = np.full((2, rows), np.nan, np.float32)
    sizes = {"in_vec_size": np.int32(columns), "out_vec_size": np.int32(rows)}
    buffers = {"w": w, "scales": scales, "biases": biases, "x": x, "y": y} | sizes
    run(kernel, buffers, (2, rows // 8, 1), (32, 2, 1), order)
    want = x.astype(np.float64) @ values.T
    assert np.abs(y - want).max() <= 1e-5 * np.abs(want).max()


def attention(q, k, v, scale, causal):
    """Softmax attention in float64; `(heads, positions, head_dim)`, several heads of q for one of k and v."""
    repeat = len(q) // len(k)
    q, k, v = q.astype(np.float64), k.astype(np.float64).repeat(repeat, 0), v.astype(np.float64).repeat(repeat, 0)
    scores = scale * q @ k.transpose(0, 2, 1)
    if causal:
        later = np.arange(k.shape[1]) > np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        scores[:, later] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def attention_inputs(type_name, length, keys, head_dim=64):
    rng = np.random.default_rng(length + keys)
    dtype = TYPES[type_name][0]
    shapes = ((6, length, head_dim), (2, keys, head_dim), (2, keys, head_dim))
    q, k, v = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    strides = {"k_head_stride": keys * head_dim, "v_head_stride": keys * head_dim}
    strides |= {"k_seq_stride": head_dim, "v_seq_stride": head_dim}
    buffers = {"queries": q, "keys": k, "values": v, "N": np.int32(keys), "gqa_factor": np.int32(3)}
    buffers |= {name: np.uint64(stride) for name, stride in strides.items()} | {"scale": np.float32(head_dim**-0.5)}
    return buffers


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize(("length", "keys"), [(1, 1), (1, 77), (3, 40)])
@pytest.mark.parametrize("order", ORDERS)
def test_attention(type_name, length, keys, order):
    dtype, tolerance = TYPES[type_name]
    buffers = attention_inputs(type_name, length, keys)
    causal = length > 1
    kernel = mlx_kernel("sdpa_vector.h", "sdpa_vector", {"T": type_name, "D": 64, "V": 64}, do_causal=causal)
    out = np.full((6, length, 64), np.nan, dtype)
    run(kernel, buffers | {"out": out}, (6, length, 1), (1024, 1, 1), order)
    want = attention(buffers["queries"], buffers["keys"], buffers["values"], 64**-0.5, causal)
    assert np.abs(out - want).max() <= tolerance


@pytest.mark.parametrize("order", ORDERS)
def test_attention_in_two_passes(order):
    """The first pass splits the keys over 32 threadgroups, the second adds their parts up."""
    buffers = attention_inputs("float", 1, 333)
    blocks, template = 32, {"T": "float", "D": 64}
    parts = {"sums": np.full((6, blocks), np.nan, np.float32), "maxs": np.full((6, blocks), np.nan, np.float32)}
    partial = np.full((6, blocks, 64), np.nan, np.float32)
    first = mlx_kernel("sdpa_vector.h", "sdpa_vector_2pass_1", template | {"V": 64, "TK": 4}, blocks=blocks)
    run(first, buffers | parts | {"out": partial}, (2, 1, blocks), (32, 3, 1), order)
    second = mlx_kernel("sdpa_vector.h", "sdpa_vector_2pass_2", template, blocks=blocks)
    out = np.full((6, 1, 64), np.nan, np.float32)
    run(second, parts | {"partials": partial, "out": out, "blocks": np.int32(blocks)}, (6, 1, 1), (1024, 1, 1), order)
    want = attention(buffers["queries"], buffers["keys"], buffers["values"], 64**-0.5, False)
    assert np.abs(out - want).max() <= 1e-5


@pytest.mark.parametrize("order", ORDERS)
def test_softmax(order):
    x = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32) * 5
    out = np.full_like(x, np.nan)
    kernel = mlx_kernel("softmax.h", "softmax_single_row", {"T": "float", "AccT": "float", "N_READS": 4})
    run(kernel, {"in": x, "out": out, "axis_size": np.int32(1000)}, (3, 1, 1), (256, 1, 1), order)
    want = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    assert np.abs(out - want / want.sum(-1, keepdims=True)).max() <= 1e-6
