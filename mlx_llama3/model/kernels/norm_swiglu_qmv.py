"""Fused kernel: a residual add, the RMSNorm after it, the feed-forward layer's gate and up products, and SwiGLU."""

from functools import cache
from typing import Any

from mlx_llama3.model.kernels import add_rms_norm, norm_qmv, qmv, swiglu_qmv
from mlx_llama3.model.kernels.metal import unique_name, with_constants
from mlx_llama3.model.layers.packed_linear import PackedLinear

import mlx.core as mx

SOURCE = norm_qmv.source(
    "first",
    "out[m * HIDDEN + first + i] = T(low / (1.0f + metal::precise::exp(-low)) * high);",
)


def reference(
    x: mx.array, update: mx.array, weight: mx.array, eps: float, w13: PackedLinear
) -> tuple[mx.array, mx.array, mx.array]:
    """Add an update to the residual stream, norm the sum, and apply SwiGLU's first half to it.

    Args:
        x: the stream, `(B, S, dim)`.
        update: what to add, `(B, S, dim)`.
        weight: the gains of the norm, `(dim,)`.

    Returns:
        The new stream `x + update`, `(B, S, dim)`; `silu(w1 n) * (w3 n)` for its norm n, `(B, S, hidden_dim)`; both in
        the dtype of x; the squared L2 norms of the update and of the new stream, float32 `(2, B, S)`.
    """
    h, normed, squares = add_rms_norm.reference(x, update, weight, eps)
    return h, swiglu_qmv.reference(w13, normed), squares


def takes(x: mx.array, update: mx.array, weight: mx.array, w13: PackedLinear) -> bool:
    """Whether the kernel takes these: stream, update and gains of one dtype, otherwise as `swiglu_qmv`."""
    return norm_qmv.takes(x, update, weight, w13)


def fused(
    x: mx.array, update: mx.array, weight: mx.array, eps: float, w13: PackedLinear
) -> tuple[mx.array, mx.array, mx.array]:
    """As `reference`, in one kernel for decoding; runs the reference for inputs that the kernel does not take.

    The norm stays in float32, and only results are rounded. Grid: `hidden_dim / 4` threadgroups of 64 threads. Each
    byte of the matrix is read once. Every simdgroup reads x, update and gains, from the GPU's cache. Threadgroup
    memory: none.
    """
    if not takes(x, update, weight, w13):
        return reference(x, update, weight, eps, w13)
    matrix = w13["parts"][0]
    B, S, dim = x.shape
    hidden = matrix["weight"].shape[0] // 2
    kernel = _kernel(mx.fast.metal_kernel, x.dtype, dim, hidden, matrix.bits, matrix.group_size, B * S, eps)
    return tuple(
        kernel(
            inputs=[x, update, weight, matrix["weight"], matrix["scales"], matrix["biases"]],
            output_shapes=[x.shape, (B, S, hidden), (2, B, S)],
            output_dtypes=[x.dtype, x.dtype, mx.float32],
            **qmv.dispatch(2 * hidden),
        )
    )


@cache
def _kernel(make: Any, dtype: mx.Dtype, dim: int, hidden: int, bits: int, group: int, rows: int, eps: float) -> Any:
    sizes = {"DIM": dim, "HIDDEN": hidden, "BITS": bits, "GROUP": group, "M": rows}
    constants = sizes | {"APART": hidden, "EPS": eps} | qmv.tiles(bits)
    return make(
        name=unique_name("norm_swiglu_qmv", dtype, *sizes.values(), eps),
        input_names=norm_qmv.INPUTS,
        output_names=["stream", "out", "squares"],
        source=with_constants(SOURCE, dtype, **constants),
    )
