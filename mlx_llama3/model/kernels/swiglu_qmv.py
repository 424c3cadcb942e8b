"""Fused kernel: the gate and up products of the feed-forward layer, and SwiGLU."""

from functools import cache
from typing import Any

from mlx_llama3.model.kernels.metal import TYPES, unique_name, with_constants
from mlx_llama3.model.layers.packed_linear import PackedLinear

import mlx.core as mx
import mlx.nn as nn

LANES = 32
SIMDGROUPS = 2  # a threadgroup
PAIRS = 2  # rows of w1, and the same rows of w3, that a simdgroup multiplies
PACKS = 4  # words of 16 bits that a lane reads of a row at a time
MAX_ROWS = 4  # rows of x; with more, a matrix-matrix product is faster
BITS = (4, 8)
GROUPS = (32, 64, 128)

# A lane multiplies VALUES numbers of a weight row at a time, the simdgroup LANES times as many. It loads the numbers of
# all its rows before it uses any, and loads each once for all rows of x.
# In an affine group, the sum over (scale * quant + bias) * x is scale * sum(quant * x) + bias * sum(x), so the inner
# loop multiplies bare integers. These are masked but not shifted down. Instead, x is divided by the place value of the
# bits, a power of two, which is exact (as in MLX's `affine_qmv_fast`).
SOURCE = """
    const uint lane = thread_index_in_simdgroup;
    const uint first = (threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup) * PAIRS;
    const device ushort* packed = (const device ushort*)w;

    float sums[M][2 * PAIRS];
    for (uint m = 0; m < M; m++) {
        for (uint r = 0; r < 2 * PAIRS; r++) {
            sums[m][r] = 0;
        }
    }

    // Lanes past the end of a row skip the loop and add 0.
    for (uint k = lane * VALUES; k < DIM; k += LANES * VALUES) {
        ushort quants[2 * PAIRS][PACKS];
        float scale[2 * PAIRS];
        float bias[2 * PAIRS];
        for (uint r = 0; r < 2 * PAIRS; r++) {
            const uint row = first + r / 2 + (r % 2) * HIDDEN;  // w1 and w3 alternate
            for (uint i = 0; i < PACKS; i++) {
                quants[r][i] = packed[row * (DIM / A_PACK) + k / A_PACK + i];
            }
            scale[r] = float(scales[row * (DIM / GROUP) + k / GROUP]);
            bias[r] = float(biases[row * (DIM / GROUP) + k / GROUP]);
        }
        for (uint m = 0; m < M; m++) {
            float part[VALUES];
            float total = 0;
            for (uint i = 0; i < PACKS; i++) {
                float few = 0;  // summed in two levels, which loses less precision than one long sum
                for (uint j = 0; j < A_PACK; j++) {
                    const float value = float(x[m * DIM + k + i * A_PACK + j]);
                    few += value;
                    part[i * A_PACK + j] = value / float(1u << (BITS * j));
                }
                total += few;
            }
            for (uint r = 0; r < 2 * PAIRS; r++) {
                float dot = 0;
                for (uint i = 0; i < PACKS; i++) {
                    float few = 0;
                    for (uint j = 0; j < A_PACK; j++) {
                        const ushort mask = ushort(((1u << BITS) - 1u) << (BITS * j));
                        few += part[i * A_PACK + j] * float(ushort(quants[r][i] & mask));
                    }
                    dot += few;
                }
                sums[m][r] += scale[r] * dot + bias[r] * total;
            }
        }
    }

    for (uint m = 0; m < M; m++) {
        for (uint pair = 0; pair < PAIRS; pair++) {
            const float gate = simd_sum(sums[m][2 * pair]);
            const float up = simd_sum(sums[m][2 * pair + 1]);
            if (lane == 0) {
                out[m * HIDDEN + first + pair] = T(gate / (1.0f + metal::precise::exp(-gate)) * up);
            }
        }
    }
"""


def reference(w13: PackedLinear, x: mx.array) -> mx.array:
    """SwiGLU (arXiv 2002.05202): x `(..., dim)` -> `silu(w1 x) * (w3 x)`, `(..., hidden_dim)` in the dtype of x."""
    gate, up = w13(x)
    return gate * mx.sigmoid(gate) * up


def takes(w13: PackedLinear, x: mx.array) -> bool:
    """Whether the kernel takes these: w1 and w3 stacked in one matrix, affine with 4 or 8 bits; up to 4 rows of x, in
    the dtype of the scales."""
    matrix = w13.parts[0]
    if len(w13.parts) > 1 or type(matrix) is not nn.QuantizedLinear:
        return False
    dim, hidden = x.shape[-1], matrix.weight.shape[0] // 2
    return (
        x.size <= MAX_ROWS * dim
        and x.dtype in TYPES
        and matrix.mode == "affine"
        and matrix.bits in BITS
        and matrix.group_size in GROUPS
        and x.dtype == matrix.scales.dtype == matrix.biases.dtype
        and "bias" not in matrix
        and dim % matrix.group_size == 0
        and hidden % (SIMDGROUPS * PAIRS) == 0
        and 2 * hidden * dim < 1 << 32  # indices are 32 bits wide
    )


def fused(w13: PackedLinear, x: mx.array) -> mx.array:
    """As `reference`, in one kernel for decoding; runs the reference for inputs that the kernel does not take.

    Silu is computed in float32 and only the result is rounded. Grid: `hidden_dim / 4` threadgroups of 64 threads. Each
    byte of the weights, scales and biases is read once. Every threadgroup reads x, from the GPU's cache. Threadgroup
    memory: none.
    """
    if not takes(w13, x):
        return reference(w13, x)
    matrix = w13.parts[0]
    dim, hidden = x.shape[-1], matrix.weight.shape[0] // 2
    kernel = _kernel(mx.fast.metal_kernel, x.dtype, dim, hidden, matrix.bits, matrix.group_size, x.size // dim)
    (out,) = kernel(
        inputs=[x, matrix.weight, matrix.scales, matrix.biases],
        grid=(hidden // PAIRS * LANES, 1, 1),
        threadgroup=(SIMDGROUPS * LANES, 1, 1),
        output_shapes=[(*x.shape[:-1], hidden)],
        output_dtypes=[x.dtype],
    )
    return out


@cache
def _kernel(make: Any, dtype: mx.Dtype, dim: int, hidden: int, bits: int, group: int, rows: int) -> Any:
    sizes = {"DIM": dim, "HIDDEN": hidden, "BITS": bits, "GROUP": group, "M": rows}
    a_pack = 16 // bits
    tiles = {"A_PACK": a_pack, "PACKS": PACKS, "VALUES": PACKS * a_pack}
    threads = {"LANES": LANES, "SIMDGROUPS": SIMDGROUPS, "PAIRS": PAIRS}
    return make(
        name=unique_name("swiglu_qmv", dtype, *sizes.values()),
        input_names=["x", "w", "scales", "biases"],
        output_names=["out"],
        source=with_constants(SOURCE, dtype, **sizes, **tiles, **threads),
    )
