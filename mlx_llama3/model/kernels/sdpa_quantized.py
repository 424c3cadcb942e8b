"""Fused kernel: attention of one new position, or a few, over a quantized cache (`cache/quantized.py`).

MLX has no kernel for this. Its own functions would dequantize every position first, or need six passes over memory.
"""

import math
from functools import cache, lru_cache
from typing import Any

from mlx_llama3.model.kernels.kv_packing import PackedLayout
from mlx_llama3.model.kernels.metal import TYPES, unique_name, with_constants
from mlx_llama3.model.kernels.sdpa_quantized_metal import ATTEND, REDUCE, STORE_OUTPUT, STORE_PART

import mlx.core as mx

HEAD_DIMS = (64, 128)
MAX_GROUP = 16  # query heads of one KV head
MAX_ROWS = 48  # query heads of one KV head, times new positions

NUMBERS = 8  # numbers of a key in one thread: a word of each half, and each half lies in one group
HELD = 4  # query rows in one thread
# Most simdgroups of a threadgroup: a thread needs some 100 registers, and up to 384 threads may have the full number.
SIMDGROUPS = 12
REDUCERS = 4  # threads that share one number of the output in the second pass

# Context length from which a KV head's positions are split over several threadgroups. MLX splits from here on for large
# chips. For others it splits from 4096 on, but it has a threadgroup for each query head, some 4 times as many as here.
SPLIT_FROM = 1024
POSITIONS_A_BLOCK = 256
BLOCKS = (8, 64)  # fewest and most blocks


def reference(
    q: mx.array, dense: mx.array, packed: mx.array, lengths: tuple[int, int], scale: float, layout: PackedLayout
) -> mx.array:
    """Softmax attention of the newest S positions to all positions so far, causal among the S.

    Args:
        q: rotated queries `(B, n_heads, S, head_dim)`.
        dense: unpacked keys and values, `(2, B, n_kv_heads, room, head_dim)`; the newest S are the last ones in use.
        packed: packed keys and values, all older than the S, uint32 `(B, n_kv_heads, capacity, layout.words)`.
        lengths: number of positions in use, of `dense` (at least S) and of `packed`.
        scale: factor of the scores, `head_dim ** -0.5`.
        layout: layout of a packed position.

    Returns:
        `(B, n_heads, S, head_dim)` in the dtype of q; computed in float32.
    """
    B, n_heads, S, head_dim = q.shape
    n_kv_heads, (n_dense, n_packed) = packed.shape[1], lengths
    x = (q.astype(mx.float32) * scale).reshape(B, n_kv_heads, -1, head_dim)  # rows: query heads of a KV head, times S
    keys, values = (dense[i, :, :, :n_dense].astype(mx.float32) for i in range(2))
    scores = x @ keys.swapaxes(-1, -2)  # (B, n_kv_heads, rows, n_dense)
    if S > 1:
        seen = mx.arange(n_dense) <= mx.arange(n_dense - S, n_dense)[:, None]
        scores = mx.where(mx.tile(seen, (n_heads // n_kv_heads, 1)), scores, -mx.inf)
    if not n_packed:
        return (mx.softmax(scores, axis=-1) @ values).reshape(q.shape).astype(q.dtype)
    packed = packed[:, :, :n_packed]
    scores = mx.concatenate([scores, layout.keys(packed).scores(x)], axis=-1)
    weights = mx.softmax(scores, axis=-1)
    out = weights[..., :n_dense] @ values + layout.values(packed).sums(weights[..., n_dense:])
    return out.reshape(q.shape).astype(q.dtype)


def takes(q: mx.array, dense: mx.array, packed: mx.array, layout: PackedLayout) -> bool:
    """Whether the kernel takes these: heads of 64 or 128, at most 16 query heads for a KV head, and at most 48 query
    rows (query heads of a KV head, times new positions)."""
    _, n_heads, S, head_dim = q.shape
    group, rest = divmod(n_heads, packed.shape[1])
    return (
        q.dtype in TYPES
        and q.dtype == dense.dtype
        and head_dim in HEAD_DIMS
        and head_dim == layout.head_dim
        and rest == 0
        and group <= MAX_GROUP
        and group * S <= MAX_ROWS
        and packed.size > 0  # else MLX would bind it in another address space
    )


def fused(
    q: mx.array, dense: mx.array, packed: mx.array, lengths: tuple[int, int], scale: float, layout: PackedLayout
) -> mx.array:
    """As `reference`, in one kernel, or in two from 1024 positions on; runs the reference for inputs not taken.

    Grid: a threadgroup of up to 384 threads for each KV head of each sequence. From 1024 positions on, they are split
    into blocks with a threadgroup each: one block for 256 positions, 8 to 64 blocks in all.

    A threadgroup serves all query heads of its KV head, so the used positions of `dense` and `packed` are read once,
    and no others. The buffers are bound whole, with their strides, so nothing is copied. Each block writes
    `4 * (head_dim + 2)` bytes for each query row, which the second kernel reads. Threadgroup memory:
    `4 * 12 * (head_dim + 8)` bytes at most.
    """
    if not takes(q, dense, packed, layout):
        return reference(q, dense, packed, lengths, scale, layout)
    B, n_heads, S, head_dim = q.shape
    n_kv_heads, blocks = packed.shape[1], _blocks(sum(lengths))
    group = n_heads // n_kv_heads
    threads = 32 * _splits(group * S) * _row_blocks(group * S)
    is_split = blocks > 1
    (out,) = _attend(mx.fast.metal_kernel, q.dtype, group, S, layout, scale, is_split)(
        inputs=[q, dense, packed, _as_array(lengths)],
        grid=(threads * blocks, n_kv_heads, B),
        threadgroup=(threads, 1, 1),
        output_shapes=[(B * n_heads * S, blocks, head_dim + 2) if is_split else q.shape],
        output_dtypes=[mx.float32 if is_split else q.dtype],
    )
    if not is_split:
        return out
    threads = REDUCERS * head_dim
    (out,) = _reduce(mx.fast.metal_kernel, q.dtype, head_dim)(
        inputs=[out],
        grid=(threads * B * n_heads * S, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[q.shape],
        output_dtypes=[q.dtype],
    )
    return out


def _blocks(positions: int) -> int:
    """Number of blocks, one threadgroup each, that the positions of a KV head are split into."""
    if positions < SPLIT_FROM:
        return 1
    fewest, most = BLOCKS
    return min(most, max(fewest, positions // POSITIONS_A_BLOCK))


def _row_blocks(rows: int) -> int:
    """Number of simdgroups that together hold each query row once."""
    return -(-rows // HELD)


def _splits(rows: int) -> int:
    """Number of simdgroups that hold the same query rows and share the positions."""
    return SIMDGROUPS // _row_blocks(rows)


@lru_cache(maxsize=1)
def _as_array(lengths: tuple[int, int]) -> mx.array:
    """The lengths as an array, made once and used by all layers of a pass."""
    return mx.array(lengths, dtype=mx.uint32)


@cache
def _attend(
    make: Any, dtype: mx.Dtype, group: int, positions: int, layout: PackedLayout, scale: float, is_split: bool
) -> Any:
    rows = group * positions
    constants = {
        "D": layout.head_dim,
        "GROUP": group,
        "S": positions,
        "ROWS": rows,
        "HELD": -(-rows // _row_blocks(rows)),
        "SPLITS": _splits(rows),
        "SIMDGROUPS": _splits(rows) * _row_blocks(rows),
        "LANES": layout.head_dim // NUMBERS,
        "KEY_WORDS": layout.key_words,
        "VALUE_WORDS": layout.value_words,
        "KEY_GROUPS": layout.key_groups,
        "VALUE_GROUPS": layout.value_groups,
        "VALUE_BITS": layout.value_bits,
    }
    # Scores in base 2, for `exp2`, the fast exponential.
    factor = scale * math.log2(math.e)
    numbers = (
        layout.head_dim,
        group,
        positions,
        layout.value_bits,
        "parts" if is_split else "whole",
        _as_identifier(factor),
    )
    return make(
        name=unique_name("sdpa_quantized", dtype, *numbers),
        input_names=["q", "dense", "records", "lengths"],
        output_names=["out"],
        source=with_constants(
            ATTEND.replace("STORE", STORE_PART if is_split else STORE_OUTPUT),
            dtype,
            **constants,
            FACTOR=f"float FACTOR = {factor:.9e}f",
        ),
        ensure_row_contiguous=False,
    )


@cache
def _reduce(make: Any, dtype: mx.Dtype, head_dim: int) -> Any:
    return make(
        name=unique_name("sdpa_quantized_reduce", dtype, head_dim),
        input_names=["parts"],
        output_names=["out"],
        source=with_constants(REDUCE, dtype, D=head_dim, REDUCERS=REDUCERS),
    )


def _as_identifier(number: float) -> str:
    """The exact number, written as a part of an identifier."""
    return number.hex().translate(str.maketrans(".+-", "pxm"))
