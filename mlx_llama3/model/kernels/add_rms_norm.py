"""Fused kernel: the residual add of one branch and the RMSNorm before the next."""

from functools import cache
from typing import Any

from mlx_llama3.model.kernels.metal import TYPES, unique_name, with_constants

import mlx.core as mx

LANES = 32
VALUES = 4  # adjacent numbers that one thread reads, as in MLX's own norm
MAX_THREADS = 1024
MAX_DIM = 32768

# One threadgroup a row. Between the two passes over the row, a thread holds ROUNDS * VALUES numbers of the sum in
# registers. The sum is rounded to T before its norm is taken, because the rounded stream is what later layers read.
SOURCE = """
    const uint thread_index = thread_position_in_threadgroup.x;
    const uint row = threadgroup_position_in_grid.x;
    const uint rows = threadgroups_per_grid.x;
    const uint lane = thread_index_in_simdgroup;
    const uint simdgroup = simdgroup_index_in_threadgroup;
    threadgroup float partial_update[SIMDGROUPS];
    threadgroup float partial_stream[SIMDGROUPS];

    float kept[ROUNDS * VALUES];
    float of_update = 0;
    float of_stream = 0;
    for (uint round = 0; round < ROUNDS; round++) {
        const uint column = (round * THREADS + thread_index) * VALUES;
        if (column < DIM) {
            const uint at = row * DIM + column;
            for (uint i = 0; i < VALUES; i++) {
                const float added = float(update[at + i]);
                const T sum = T(float(x[at + i]) + added);
                stream[at + i] = sum;
                kept[round * VALUES + i] = float(sum);
                of_update += added * added;
                of_stream += float(sum) * float(sum);
            }
        }
    }

    of_update = simd_sum(of_update);
    of_stream = simd_sum(of_stream);
    if (lane == 0) {
        partial_update[simdgroup] = of_update;
        partial_stream[simdgroup] = of_stream;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Every simdgroup sums the partial sums itself, which saves a second barrier.
    of_update = simd_sum(lane < SIMDGROUPS ? partial_update[lane] : 0.0f);
    of_stream = simd_sum(lane < SIMDGROUPS ? partial_stream[lane] : 0.0f);
    if (thread_index == 0) {
        squares[row] = of_update;
        squares[rows + row] = of_stream;
    }

    const float scale = metal::precise::rsqrt(of_stream / float(DIM) + EPS);
    for (uint round = 0; round < ROUNDS; round++) {
        const uint column = (round * THREADS + thread_index) * VALUES;
        if (column < DIM) {
            for (uint i = 0; i < VALUES; i++) {
                const float normal = kept[round * VALUES + i] * scale;
                normed[row * DIM + column + i] = T(normal * float(weight[column + i]));
            }
        }
    }
"""


def reference(x: mx.array, update: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array, mx.array]:
    """Add an update to the residual stream, and norm the sum.

    Args:
        x: the stream, `(B, S, dim)`.
        update: what to add, `(B, S, dim)`.
        weight: the gains of the norm, `(dim,)`.

    Returns:
        The new stream `x + update` and `rms_norm(x + update) * weight`, each `(B, S, dim)` in the dtype of x; the
        squared L2 norms of the update and of the new stream, float32 `(2, B, S)`.
    """
    h = x + update
    squares = mx.stack([mx.square(state.astype(mx.float32)).sum(-1) for state in (update, h)])
    return h, mx.fast.rms_norm(h, weight, eps), squares


def takes(x: mx.array, update: mx.array, weight: mx.array) -> bool:
    """Whether the kernel takes these: one float dtype for all, and rows of 8 to 32768 numbers, a multiple of 4."""
    dim = weight.size
    return (
        x.dtype in TYPES
        and x.size < 1 << 32  # indices are 32 bits wide
        and x.dtype == update.dtype == weight.dtype
        and x.shape == update.shape
        and x.ndim == 3
        and x.shape[2] == dim
        and dim % VALUES == 0
        and 2 * VALUES <= dim <= MAX_DIM
    )


def fused(x: mx.array, update: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array, mx.array]:
    """As `reference`, in one kernel; runs the reference for inputs that the kernel does not take.

    Grid: a threadgroup of up to 1024 threads for each row of `dim` numbers. The kernel reads x, update and the gains
    once, and writes the stream and the norm once: `(2 + 2) * B * S + 1` rows of `dim`, and 8 bytes of squared norms a
    row. Threadgroup memory: 256 bytes at most.
    """
    if not takes(x, update, weight):
        return reference(x, update, weight, eps)
    B, S, dim = x.shape
    threads = _threads(dim)
    return tuple(
        _kernel(mx.fast.metal_kernel, x.dtype, dim, eps)(
            inputs=[x, update, weight],
            grid=(threads * B * S, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[x.shape, x.shape, (2, B, S)],
            output_dtypes=[x.dtype, x.dtype, mx.float32],
        )
    )


def _threads(dim: int) -> int:
    """Threads of a threadgroup: whole simdgroups, enough for 4 numbers a thread, 1024 at most."""
    return min(MAX_THREADS, -(-dim // (VALUES * LANES)) * LANES)


@cache
def _kernel(make: Any, dtype: mx.Dtype, dim: int, eps: float) -> Any:
    threads = _threads(dim)
    constants = {
        "DIM": dim,
        "VALUES": VALUES,
        "THREADS": threads,
        "SIMDGROUPS": threads // LANES,
        "ROUNDS": -(-dim // (VALUES * threads)),
    }
    return make(
        name=unique_name("add_rms_norm", dtype, dim, eps),
        input_names=["x", "update", "weight"],
        output_names=["stream", "normed", "squares"],
        source=with_constants(SOURCE, dtype, **constants, EPS=eps),
    )
