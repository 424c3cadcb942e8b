"""Fused kernel: split the packed q|k|v projection into heads and apply RoPE to queries and keys."""

from functools import cache
from typing import Any

from mlx_llama3.model.kernels.metal import TYPES, unique_name, with_constants
from mlx_llama3.model.layers.rope import RopeTables, StartPos, rotate

import mlx.core as mx

HEADS_A_THREAD = 4
THREADS = 256
MAX_HEAD_DIM = 2048  # a threadgroup has a thread for each pair, 1024 at most

# The sine is the precise one, because at the large angles of far positions the fast one returns noise.
ANGLE = """
    const float angle = float(int(s) + OFFSET) * inverse[pair];
    const float sine = metal::precise::sin(angle);
    const float cosine = metal::precise::cos(angle);
"""

# Rotates the numbers `low` and `high`, at `pair` and `pair + PAIRS` in `head`, and stores them.
ROTATE = """
        const T turned_low = T(float(low) * cosine - float(high) * sine);
        const T turned_high = T(float(low) * sine + float(high) * cosine);
        if (head < N_HEADS) {
            const uint to = ((b * N_HEADS + head) * S + s) * 2 * PAIRS + pair;
            q[to] = turned_low;
            q[to + PAIRS] = turned_high;
        } else {
            const uint which = (head - N_HEADS) / N_KV_HEADS;  // 0: keys, 1: values
            const uint kv_head = (head - N_HEADS) % N_KV_HEADS;
            const uint to = (((which * B + b) * N_KV_HEADS + kv_head) * S + s) * 2 * PAIRS + pair;
            kv[to] = which == 0 ? turned_low : T(low);
            kv[to + PAIRS] = which == 0 ? turned_high : T(high);
        }
"""

# One thread rotates the numbers i and i + PAIRS of HEADS_A_THREAD consecutive heads: these share their angle.
SOURCE = f"""
    const uint pair = thread_position_in_grid.x;
    const uint first = thread_position_in_grid.y * HEADS_A_THREAD;
    const uint row = thread_position_in_grid.z;
    const uint B = qkv_shape[0];
    const uint S = qkv_shape[1];
    const uint b = row / S;
    const uint s = row % S;

    {ANGLE.strip()}

    for (uint head = first; head < metal::min(first + HEADS_A_THREAD, N_HEADS + 2 * N_KV_HEADS); head++) {{
        const uint at = (row * (N_HEADS + 2 * N_KV_HEADS) + head) * 2 * PAIRS + pair;
        const T low = qkv[at];
        const T high = qkv[at + PAIRS];
        {ROTATE.strip()}
    }}
"""


def reference(
    qkv: mx.array, n_heads: int, n_kv_heads: int, start_pos: StartPos, freqs: RopeTables
) -> tuple[mx.array, mx.array]:
    """Split the output of `wq|wk|wv` into heads, and apply RoPE to queries and keys.

    Args:
        qkv: `(B, S, (n_heads + 2 n_kv_heads) * head_dim)`.

    Returns:
        Queries `(B, n_heads, S, head_dim)`; keys and values in one array, `(2, B, n_kv_heads, S, head_dim)`.
    """
    B, S, _ = qkv.shape
    heads = qkv.reshape(B, S, n_heads + 2 * n_kv_heads, -1).swapaxes(1, 2)  # (B, heads, S, head_dim)
    # Queries and keys have the same angles, so one rotation serves both.
    qk, v = mx.split(heads, [n_heads + n_kv_heads], axis=1)
    q, k = mx.split(rotate(qk, start_pos, freqs), [n_heads], axis=1)
    return q, mx.stack([k, v])


def takes(qkv: mx.array, n_heads: int, n_kv_heads: int, start_pos: StartPos, freqs: RopeTables) -> bool:
    """Whether the kernel takes these: heads of up to 2048; one start position for all sequences, or one for each."""
    width = 2 * freqs.inv_freq.size
    return (
        qkv.dtype in TYPES
        and qkv.size < 1 << 32  # indices are 32 bits wide
        and freqs.inv_freq.dtype == mx.float32
        and width <= MAX_HEAD_DIM
        and qkv.shape[2] == (n_heads + 2 * n_kv_heads) * width
        and freqs.offset.shape in ((), (qkv.shape[0],))
    )


def fused(
    qkv: mx.array, n_heads: int, n_kv_heads: int, start_pos: StartPos, freqs: RopeTables
) -> tuple[mx.array, mx.array]:
    """As `reference`, in one kernel; runs the reference for inputs that the kernel does not take.

    The kernel computes the angles itself, in float32. Grid: pairs of a head, groups of 4 heads, B * S. Threadgroup: 256
    threads at most, or head_dim / 2 if that is more. It reads `qkv` once, writes the outputs once, and reads
    4 * head_dim / 2 bytes of frequencies.
    """
    if not takes(qkv, n_heads, n_kv_heads, start_pos, freqs):
        return reference(qkv, n_heads, n_kv_heads, start_pos, freqs)
    B, S, _ = qkv.shape
    pairs = freqs.inv_freq.size
    groups = -(-(n_heads + 2 * n_kv_heads) // HEADS_A_THREAD)
    kernel = _kernel(mx.fast.metal_kernel, qkv.dtype, pairs, n_heads, n_kv_heads, freqs.offset.ndim)
    return tuple(
        kernel(
            inputs=[qkv, freqs.inv_freq, freqs.offset],
            grid=(pairs, groups, B * S),
            threadgroup=(pairs, max(1, min(groups, THREADS // pairs)), 1),
            output_shapes=[(B, n_heads, S, 2 * pairs), (2, B, n_kv_heads, S, 2 * pairs)],
            output_dtypes=[qkv.dtype, qkv.dtype],
        )
    )


@cache
def _kernel(make: Any, dtype: mx.Dtype, pairs: int, n_heads: int, n_kv_heads: int, offset_ndim: int) -> Any:
    constants = {"PAIRS": pairs, "N_HEADS": n_heads, "N_KV_HEADS": n_kv_heads, "HEADS_A_THREAD": HEADS_A_THREAD}
    body = SOURCE.replace("OFFSET", "offset[b]" if offset_ndim else "offset")
    return make(
        name=unique_name("rope_qkv", dtype, *constants.values(), offset_ndim),
        input_names=["qkv", "inverse", "offset"],
        output_names=["q", "kv"],
        source=with_constants(body, dtype, **constants),
    )
