"""The product of a few rows with a quantized matrix: the Metal text that the fused products share.

A simdgroup multiplies `ROW_PAIRS` rows of the matrix, and the same number of rows that are `APART` further on. Each
fused product says which rows belong together, how an input is read, and what becomes of a pair's two sums.
"""

from typing import Any

from mlx_llama3.model.kernels.metal import TYPES
from mlx_llama3.model.layers.packed_linear import PackedLinear

import mlx.core as mx
import mlx.nn as nn

LANES = 32
SIMDGROUPS = 2  # a threadgroup
ROW_PAIRS = 2  # pairs of rows that a simdgroup multiplies
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
    const uint first = (threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup) * ROW_PAIRS;
    const device ushort* packed = (const device ushort*)w;
    BEGIN
    float sums[M][2 * ROW_PAIRS];
    for (uint m = 0; m < M; m++) {
        for (uint r = 0; r < 2 * ROW_PAIRS; r++) {
            sums[m][r] = 0;
        }
    }

    // Lanes past the end of a row skip the loop and add 0.
    for (uint k = lane * VALUES; k < DIM; k += LANES * VALUES) {
        ushort quants[2 * ROW_PAIRS][PACKS];
        float scale[2 * ROW_PAIRS];
        float bias[2 * ROW_PAIRS];
        for (uint r = 0; r < 2 * ROW_PAIRS; r++) {
            const uint row = FIRST_ROW + r / 2 + (r % 2) * APART;  // the two rows of a pair alternate
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
                    const uint column = k + i * A_PACK + j;
                    READ
                    few += value;
                    part[i * A_PACK + j] = value / float(1u << (BITS * j));
                }
                total += few;
            }
            for (uint r = 0; r < 2 * ROW_PAIRS; r++) {
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
    END
"""


def source(first_row: str, read: str, end: str, *, begin: str = "") -> str:
    """The text of a kernel.

    Args:
        first_row: an expression with `first`, the number of the simdgroup's first pair: that pair's first row.
        read: declares `float value`, the input of row `m` and `column`.
        end: uses `sums[m][2 * pair]` and `sums[m][2 * pair + 1]`, each lane's part of the sums of a pair.
        begin: declarations before the loop.
    """
    text = SOURCE
    for placeholder, part in (("BEGIN", begin), ("FIRST_ROW", first_row), ("READ", read), ("END", end)):
        text = text.replace(placeholder, part.strip())
    return text


def takes(packed: PackedLinear, x: mx.array) -> bool:
    """Whether the product takes these: one matrix, affine with 4 or 8 bits; up to 4 rows of x, in the dtype of the
    scales."""
    parts = packed["parts"]  # an item of a module is found many times sooner than an attribute
    matrix = parts[0]
    if len(parts) > 1 or type(matrix) is not nn.QuantizedLinear:
        return False
    rows, dim, dtype = matrix["weight"].shape[0], x.shape[-1], x.dtype
    return (
        x.size <= MAX_ROWS * dim
        and dtype in TYPES
        and matrix.mode == "affine"
        and matrix.bits in BITS
        and matrix.group_size in GROUPS
        and dtype == matrix["scales"].dtype == matrix["biases"].dtype
        and "bias" not in matrix
        and dim % matrix.group_size == 0
        and rows % (2 * SIMDGROUPS * ROW_PAIRS) == 0
        and rows * dim < 1 << 32  # indices are 32 bits wide
    )


def dispatch(rows: int) -> dict[str, Any]:
    """Grid and threadgroup for a matrix of `rows` rows: 8 rows a threadgroup of 64 threads."""
    return {"grid": (rows // (2 * ROW_PAIRS) * LANES, 1, 1), "threadgroup": (SIMDGROUPS * LANES, 1, 1)}


def tiles(bits: int) -> dict[str, int]:
    """The constants that follow from the bits, and those of the threads."""
    a_pack = 16 // bits
    return {
        "A_PACK": a_pack,
        "PACKS": PACKS,
        "VALUES": PACKS * a_pack,
        "LANES": LANES,
        "SIMDGROUPS": SIMDGROUPS,
        "ROW_PAIRS": ROW_PAIRS,
    }
