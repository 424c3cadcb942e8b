"""Attention of one new position, or a few, over a quantized cache: `quantized_cache.py` says what is kept how.

MLX has no kernel for it; its own functions would make every position dense again, or need six passes over memory.
"""

import math
from functools import cache, lru_cache
from typing import Any

from mlx_llama3.model.kernels.kv_packing import PackedLayout
from mlx_llama3.model.kernels.metal import TYPES, completed, title
from mlx_llama3.model.kernels.sdpa_quantized_metal import ATTEND, REDUCE, STORE_OUTPUT, STORE_PART

import mlx.core as mx

HEAD_DIMS = (64, 128)
MOST_GROUP = 16  # query heads of one KV head
MOST_ROWS = 48  # query heads of one KV head, times new positions

NUMBERS = 8  # of a key, that one thread holds: a word of each half, which lie in a group each
HELD = 4  # rows of queries that one thread holds
# At most, in a threadgroup: a thread needs some 100 registers, and 384 threads may have as many as there can be.
SIMDGROUPS = 12
REDUCERS = 4  # threads that share one number of the output in the second pass

# Below so many positions one threadgroup a KV head reads them all. MLX splits from here on, on its large chips; on
# others from 4096 on, but there it has a threadgroup for each query head, of which there are some 4 times as many.
SPLIT_FROM = 1024
POSITIONS_A_BLOCK = 256
BLOCKS = (8, 64)  # at least and at most


def reference(
    q: mx.array, dense: mx.array, records: mx.array, lengths: tuple[int, int], scale: float, layout: PackedLayout
) -> mx.array:
    """Softmax attention of the newest S positions to all so far, causal among themselves.

    Args:
        q: rotated queries `(B, n_heads, S, head_dim)`.
        dense: keys and values as they are, `(2, B, n_kv_heads, room, head_dim)`; the newest S stand last of those used.
        records: packed ones, all older than those S, uint32 `(B, n_kv_heads, capacity, layout.words)`.
        lengths: how many positions of `dense` (S at least) and of `records` are used.
        scale: of the products.
        layout: of a record.

    Returns:
        `(B, n_heads, S, head_dim)` in the dtype of q; computed in float32.
    """
    B, n_heads, S, head_dim = q.shape
    n_kv_heads, (n_dense, n_records) = records.shape[1], lengths
    x = (q.astype(mx.float32) * scale).reshape(B, n_kv_heads, -1, head_dim)  # rows: heads of the group, times S
    keys, values = (dense[i, :, :, :n_dense].astype(mx.float32) for i in range(2))
    scores = x @ keys.swapaxes(-1, -2)  # (B, n_kv_heads, rows, n_dense)
    if S > 1:
        seen = mx.arange(n_dense) <= mx.arange(n_dense - S, n_dense)[:, None]
        scores = mx.where(mx.tile(seen, (n_heads // n_kv_heads, 1)), scores, -mx.inf)
    if not n_records:
        return (mx.softmax(scores, axis=-1) @ values).reshape(q.shape).astype(q.dtype)
    records = records[:, :, :n_records]
    scores = mx.concatenate([scores, layout.keys(records).scores(x)], axis=-1)
    weights = mx.softmax(scores, axis=-1)
    out = weights[..., :n_dense] @ values + layout.values(records).sums(weights[..., n_dense:])
    return out.reshape(q.shape).astype(q.dtype)


def takes(q: mx.array, dense: mx.array, records: mx.array, layout: PackedLayout) -> bool:
    """Heads of 64 and 128, up to 16 query heads for a KV head, and 48 rows (heads and new positions) of queries."""
    _, n_heads, S, head_dim = q.shape
    group, rest = divmod(n_heads, records.shape[1])
    return (
        q.dtype in TYPES
        and q.dtype == dense.dtype
        and head_dim in HEAD_DIMS
        and head_dim == layout.head_dim
        and rest == 0
        and group <= MOST_GROUP
        and group * S <= MOST_ROWS
    )


def fused(
    q: mx.array, dense: mx.array, records: mx.array, lengths: tuple[int, int], scale: float, layout: PackedLayout
) -> mx.array:
    """As `reference`, in one kernel, from 1024 positions on in two; what it does not take goes there.

    Grid: a threadgroup of up to 384 threads for each KV head of each sequence, and for each block of positions where
    they are split: a block for 256 positions, 8 to 64 of them. All query heads of a KV head are in its threadgroup, so
    the used parts of `dense` and `records` are read once, nothing else of them, and nothing is copied: the buffers are
    bound whole, with their strides. Split, a block writes and the second pass reads `4 * (head_dim + 2)` bytes for each
    row of queries. Threadgroup memory: `4 * 12 * (head_dim + 8)` bytes at most.
    """
    if not takes(q, dense, records, layout):
        return reference(q, dense, records, lengths, scale, layout)
    B, n_heads, S, head_dim = q.shape
    n_kv_heads, blocks = records.shape[1], _blocks(sum(lengths))
    form = (n_heads // n_kv_heads, S, layout)
    threads = 32 * _splits(form[0] * S) * _row_blocks(form[0] * S)
    is_split = blocks > 1
    (out,) = _attend(mx.fast.metal_kernel, q.dtype, *form, scale, is_split)(
        inputs=[q, dense, records, _as_array(lengths)],
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
    """Into how many threadgroups the positions of a head are split."""
    if positions < SPLIT_FROM:
        return 1
    least, most = BLOCKS
    return min(most, max(least, positions // POSITIONS_A_BLOCK))


def _row_blocks(rows: int) -> int:
    """How many simdgroups it takes to hold all rows of queries once."""
    return -(-rows // HELD)


def _splits(rows: int) -> int:
    """How many simdgroups share the positions, for the same rows."""
    return SIMDGROUPS // _row_blocks(rows)


@lru_cache(maxsize=1)
def _as_array(lengths: tuple[int, int]) -> mx.array:
    """The same array for all layers of a pass."""
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
    # The exponential of base 2 is the fast one.
    factor = scale * math.log2(math.e)
    numbers = (layout.head_dim, group, positions, layout.value_bits, "parts" if is_split else "whole", _spelt(factor))
    return make(
        name=title("sdpa_quantized", dtype, *numbers),
        input_names=["q", "dense", "records", "lengths"],
        output_names=["out"],
        source=completed(
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
        name=title("sdpa_quantized_reduce", dtype, head_dim),
        input_names=["parts"],
        output_names=["out"],
        source=completed(REDUCE, dtype, D=head_dim, REDUCERS=REDUCERS),
    )


def _spelt(number: float) -> str:
    """A number by its bits, as a part of a name."""
    return number.hex().translate(str.maketrans(".+-", "pxm"))
