"""The add of one branch and the norm before the next."""

from functools import cache
from typing import Any

from mlx_llama3.model.kernels.metal import TYPES, completed, title

import mlx.core as mx

LANES = 32
VALUES = 4  # that lie beside each other and go to one thread, as MLX's own norm reads them
MOST_THREADS = 1024
WIDEST = 32768

# One threadgroup a row. A thread holds ROUNDS times VALUES numbers of the sum in registers between the two passes.
# The stream is rounded before it is measured, for what is stored is what goes on.
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
    // Every simdgroup adds the parts up for itself: no second barrier.
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
    """Stream `x` and `update` `(B, S, dim)`, gains `weight` `(dim,)` -> the new stream, its norm, and squared L2 norms.

    Returns:
        `x + update` and `rms_norm(x + update) * weight`, `(B, S, dim)` in the dtype of x; the squared norms of the
        update and of the new stream, float32 `(2, B, S)`.
    """
    h = x + update
    squares = mx.stack([mx.square(each.astype(mx.float32)).sum(-1) for each in (update, h)])
    return h, mx.fast.rms_norm(h, weight, eps), squares


def takes(x: mx.array, update: mx.array, weight: mx.array) -> bool:
    """One floating type for all, whole groups of 4 numbers a row, and rows of at most 32768."""
    dim = weight.size
    return (
        x.dtype in TYPES
        and x.dtype == update.dtype == weight.dtype
        and x.shape == update.shape
        and x.ndim == 3
        and x.shape[2] == dim
        and dim % VALUES == 0
        and 2 * VALUES <= dim <= WIDEST
    )


def fused(x: mx.array, update: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array, mx.array]:
    """As `reference`, in one kernel; what it does not take goes there.

    Grid: a threadgroup of up to 1024 threads a row of `dim` numbers. It reads x, update and the gains once and writes
    stream and norm once: `(2 + 2) * B * S + 1` rows of `dim`, and 8 bytes of norms a row. 256 bytes of threadgroup
    memory at most.
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
    """Whole simdgroups, enough for one group of numbers each, 1024 at most."""
    return min(MOST_THREADS, -(-dim // (VALUES * LANES)) * LANES)


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
        # eps is in the name by its bits, which make an identifier
        name=title("add_rms_norm", dtype, dim, eps.hex().translate(str.maketrans(".+-", "pxm"))),
        input_names=["x", "update", "weight"],
        output_names=["stream", "normed", "squares"],
        source=completed(SOURCE, dtype, **constants, EPS=f"float EPS = {eps:.9e}f"),
    )
