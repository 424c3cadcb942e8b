"""The add of an update to the residual stream and the RMSNorm, inside the quantized product that reads the norm.

Shared by `norm_rope_qkv` and `norm_swiglu_qmv`. The norm scales a whole row by one number, so the kernel multiplies the
unscaled row, and scales the sums. Each simdgroup reads the whole row for its product anyway, and sums its squares too.
This takes no barrier and no threadgroup memory.
"""

from mlx_llama3.model.kernels import qmv
from mlx_llama3.model.layers.packed_linear import PackedLinear

import mlx.core as mx

# The first simdgroup writes the new stream and the squared norms, those of the update and those of the stream.
BEGIN = """
    const bool writes = first == 0;
    float of_update[M];
    float of_stream[M];
    for (uint m = 0; m < M; m++) {
        of_update[m] = 0;
        of_stream[m] = 0;
    }
"""

# The sum is rounded to T before its norm is taken, because the rounded stream is what later layers read.
READ = """
                    const float added = float(update[m * DIM + column]);
                    const T sum = T(float(x[m * DIM + column]) + added);
                    const float value = float(sum) * float(weight[column]);
                    of_stream[m] += float(sum) * float(sum);
                    if (writes) {
                        of_update[m] += added * added;
                        stream[m * DIM + column] = sum;
                    }
"""

END = """
    for (uint m = 0; m < M; m++) {
        const float squared = simd_sum(of_stream[m]);
        const float inverse_rms = metal::precise::rsqrt(squared / float(DIM) + EPS);
        if (writes) {
            const float squared_update = simd_sum(of_update[m]);
            if (lane == 0) {
                squares[m] = squared_update;
                squares[M + m] = squared;
            }
        }
        for (uint i = 0; i < ROW_PAIRS; i++) {
            const float low = simd_sum(sums[m][2 * i]) * inverse_rms;
            const float high = simd_sum(sums[m][2 * i + 1]) * inverse_rms;
            if (lane == 0) {
                STORE
            }
        }
    }
"""

INPUTS = ["x", "update", "weight", "w", "scales", "biases"]


def source(first_row: str, store: str) -> str:
    """The text of a kernel. store: stores the products of row `m` with the two rows of pair `first + i`, which are in
    float32 `low` and `high`; first_row: as for `qmv.source`."""
    return qmv.source(first_row, READ, END.replace("STORE", store.strip()), begin=BEGIN)


def takes(x: mx.array, update: mx.array, weight: mx.array, packed: PackedLinear) -> bool:
    """Whether the product takes these: stream, update and gains of one dtype, and the matrix as in `qmv.takes`."""
    return (
        x.shape == update.shape
        and x.dtype == update.dtype == weight.dtype
        and weight.shape == x.shape[2:]  # and x has three axes
        and qmv.takes(packed, x)
    )
