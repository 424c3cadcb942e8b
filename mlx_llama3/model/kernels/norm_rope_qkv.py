"""Fused kernel: a residual add, the RMSNorm after it, the product with `wq|wk|wv`, and RoPE for queries and keys."""

from functools import cache
from typing import Any

from mlx_llama3.model.kernels import add_rms_norm, norm_qmv, qmv, rope_qkv
from mlx_llama3.model.kernels.metal import unique_name, with_constants
from mlx_llama3.model.layers.packed_linear import PackedLinear
from mlx_llama3.model.layers.rope import RopeTables, StartPos

import mlx.core as mx

Outputs = tuple[mx.array, tuple[mx.array, mx.array], mx.array]

SIZES = ("DIM", "BITS", "GROUP", "B", "S", "N_HEADS", "N_KV_HEADS", "PAIRS")

# The simdgroup multiplies the rows of numbers i and i + PAIRS of a head, which RoPE rotates together.
SOURCE = norm_qmv.source(
    "first + first / PAIRS * PAIRS",
    f"""
                const uint head = first / PAIRS;
                const uint pair = first % PAIRS + i;
                const uint b = m / S;
                const uint s = m % S;
                {rope_qkv.ANGLE.strip()}
                {rope_qkv.ROTATE.strip()}
    """,
)


def reference(
    x: mx.array,
    update: mx.array,
    weight: mx.array,
    eps: float,
    wqkv: PackedLinear,
    n_heads: int,
    n_kv_heads: int,
    start_pos: StartPos,
    freqs: RopeTables,
) -> Outputs:
    """Add an update to the residual stream, norm the sum, and project it to queries, keys and values.

    Args:
        x: the stream, `(B, S, dim)`.
        update: what to add, `(B, S, dim)`.
        weight: the gains of the norm, `(dim,)`.
        wqkv: to `(n_heads + 2 n_kv_heads) * head_dim` numbers.

    Returns:
        The new stream `x + update`, `(B, S, dim)`; queries `(B, n_heads, S, head_dim)` beside keys and values
        `(2, B, n_kv_heads, S, head_dim)`; all in the dtype of x; the squared L2 norms of the update and of the new
        stream, float32 `(2, B, S)`.
    """
    h, normed, squares = add_rms_norm.reference(x, update, weight, eps)
    return h, rope_qkv.reference(wqkv.packed(normed), n_heads, n_kv_heads, start_pos, freqs), squares


def takes(
    x: mx.array,
    update: mx.array,
    weight: mx.array,
    wqkv: PackedLinear,
    n_heads: int,
    n_kv_heads: int,
    start_pos: StartPos,
    freqs: RopeTables,
) -> bool:
    """Whether the kernel takes these: the product as `norm_swiglu_qmv`; heads of a multiple of 4, with one start
    position for all sequences or one for each."""
    pairs = freqs.inv_freq.size
    return (
        norm_qmv.takes(x, update, weight, wqkv)
        and freqs.inv_freq.dtype == mx.float32
        and pairs % qmv.ROW_PAIRS == 0
        and wqkv["parts"][0]["weight"].shape[0] == (n_heads + 2 * n_kv_heads) * 2 * pairs
        and freqs.offset.shape in ((), (x.shape[0],))
    )


def fused(
    x: mx.array,
    update: mx.array,
    weight: mx.array,
    eps: float,
    wqkv: PackedLinear,
    n_heads: int,
    n_kv_heads: int,
    start_pos: StartPos,
    freqs: RopeTables,
) -> Outputs:
    """As `reference`, in one kernel for decoding; runs the reference for inputs that the kernel does not take.

    The norm and the projections stay in float32, and only results are rounded. Grid: a threadgroup of 64 threads for 8
    rows of the matrix. Each byte of the matrix is read once. Every simdgroup reads x, update and gains, from the GPU's
    cache. Threadgroup memory: none.
    """
    if not takes(x, update, weight, wqkv, n_heads, n_kv_heads, start_pos, freqs):
        return reference(x, update, weight, eps, wqkv, n_heads, n_kv_heads, start_pos, freqs)
    matrix, pairs = wqkv["parts"][0], freqs.inv_freq.size
    B, S, dim = x.shape
    sizes = dim, matrix.bits, matrix.group_size, B, S, n_heads, n_kv_heads, pairs
    kernel = _kernel(mx.fast.metal_kernel, x.dtype, sizes, eps, freqs.offset.ndim)
    stream, q, kv, squares = kernel(
        inputs=[x, update, weight, matrix["weight"], matrix["scales"], matrix["biases"], freqs.inv_freq, freqs.offset],
        output_shapes=[x.shape, (B, n_heads, S, 2 * pairs), (2, B, n_kv_heads, S, 2 * pairs), (2, B, S)],
        output_dtypes=[x.dtype, x.dtype, x.dtype, mx.float32],
        **qmv.dispatch(matrix["weight"].shape[0]),
    )
    return stream, (q, kv), squares


@cache
def _kernel(make: Any, dtype: mx.Dtype, sizes: tuple[int, ...], eps: float, offset_ndim: int) -> Any:
    constants: dict[str, Any] = dict(zip(SIZES, sizes, strict=True))
    constants |= {"M": constants["B"] * constants["S"], "APART": constants["PAIRS"], "EPS": eps}
    body = SOURCE.replace("OFFSET", "offset[b]" if offset_ndim else "offset")
    return make(
        name=unique_name("norm_rope_qkv", dtype, *sizes, eps, offset_ndim),
        input_names=[*norm_qmv.INPUTS, "inverse", "offset"],
        output_names=["stream", "q", "kv", "squares"],
        source=with_constants(body, dtype, **constants, **qmv.tiles(constants["BITS"])),
    )
