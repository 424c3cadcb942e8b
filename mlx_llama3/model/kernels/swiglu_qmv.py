"""Fused kernel: the gate and up products of the feed-forward layer, and SwiGLU."""

from functools import cache
from typing import Any

from mlx_llama3.model.kernels import qmv
from mlx_llama3.model.kernels.metal import unique_name, with_constants
from mlx_llama3.model.layers.packed_linear import PackedLinear

import mlx.core as mx

# The simdgroup multiplies rows of w1, and the same rows of w3, which come HIDDEN rows after them.
SOURCE = qmv.source(
    "first",
    "const float value = float(x[m * DIM + column]);",
    """
    for (uint m = 0; m < M; m++) {
        for (uint pair = 0; pair < ROW_PAIRS; pair++) {
            const float gate = simd_sum(sums[m][2 * pair]);
            const float up = simd_sum(sums[m][2 * pair + 1]);
            if (lane == 0) {
                out[m * HIDDEN + first + pair] = T(gate / (1.0f + metal::precise::exp(-gate)) * up);
            }
        }
    }
    """,
)


def reference(w13: PackedLinear, x: mx.array) -> mx.array:
    """SwiGLU (arXiv 2002.05202): x `(..., dim)` -> `silu(w1 x) * (w3 x)`, `(..., hidden_dim)` in the dtype of x."""
    gate, up = w13(x)
    return gate * mx.sigmoid(gate) * up


def takes(w13: PackedLinear, x: mx.array) -> bool:
    """Whether the kernel takes these: w1 and w3 stacked in one matrix, affine with 4 or 8 bits; up to 4 rows of x, in
    the dtype of the scales."""
    return qmv.takes(w13, x)


def fused(w13: PackedLinear, x: mx.array) -> mx.array:
    """As `reference`, in one kernel for decoding; runs the reference for inputs that the kernel does not take.

    Silu is computed in float32 and only the result is rounded. Grid: `hidden_dim / 4` threadgroups of 64 threads. Each
    byte of the weights, scales and biases is read once. Every threadgroup reads x, from the GPU's cache. Threadgroup
    memory: none.
    """
    if not takes(w13, x):
        return reference(w13, x)
    matrix = w13["parts"][0]
    dim, hidden = x.shape[-1], matrix["weight"].shape[0] // 2
    kernel = _kernel(mx.fast.metal_kernel, x.dtype, dim, hidden, matrix.bits, matrix.group_size, x.size // dim)
    (out,) = kernel(
        inputs=[x, matrix["weight"], matrix["scales"], matrix["biases"]],
        output_shapes=[(*x.shape[:-1], hidden)],
        output_dtypes=[x.dtype],
        **qmv.dispatch(2 * hidden),
    )
    return out


@cache
def _kernel(make: Any, dtype: mx.Dtype, dim: int, hidden: int, bits: int, group: int, rows: int) -> Any:
    sizes = {"DIM": dim, "HIDDEN": hidden, "BITS": bits, "GROUP": group, "M": rows}
    return make(
        name=unique_name("swiglu_qmv", dtype, *sizes.values()),
        input_names=["x", "w", "scales", "biases"],
        output_names=["out"],
        source=with_constants(SOURCE, dtype, **sizes, APART=hidden, **qmv.tiles(bits)),
    )
