"""Rows of a tensor that model parallelism has cut into shards, in the order in which Hugging Face keeps them.

How Meta cuts: fairscale's ColumnParallelLinear and VocabParallelEmbedding split axis 0, RowParallelLinear axis 1
(`models/llama3/model.py`). All functions return bits in a numpy array, as `StoredTensor.rows` does.
"""

from collections.abc import Callable, Sequence

import numpy as np

from convert.storage.stored_tensor import DTYPES, StoredTensor
from mlx_llama3.errors import UserError

ReadRows = Callable[[int, int], np.ndarray]
_REPLICA_TOLERANCE = 1e-2


def stack_rows(parts: Sequence[StoredTensor]) -> ReadRows:
    """Shards one below the other: (rows, columns) each -> (len(parts) * rows, columns)."""
    height = parts[0].shape[0]

    def read(start: int, stop: int) -> np.ndarray:
        pieces = [
            parts[number].rows(max(start - number * height, 0), min(stop - number * height, height))
            for number in range(start // height, -(-stop // height))
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    return read


def join_columns(parts: Sequence[StoredTensor]) -> ReadRows:
    """Shards side by side: (rows, columns) each -> (rows, len(parts) * columns)."""

    def read(start: int, stop: int) -> np.ndarray:
        pieces = [part.rows(start, stop) for part in parts]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)

    return read


def agreeing(parts: Sequence[StoredTensor]) -> ReadRows:
    """Every shard holds the whole vector: the first one's, if all agree to 1e-2. Otherwise UserError on reading."""

    def read(start: int, stop: int) -> np.ndarray:
        first = parts[0].rows(start, stop)
        for other in parts[1:]:
            apart = np.abs(_float32(other.rows(start, stop), other.dtype) - _float32(first, parts[0].dtype))
            # A NaN compares as not agreeing.
            if not np.all(apart <= _REPLICA_TOLERANCE):
                raise UserError(
                    f"{other.path}: {other.name} differs from that in {parts[0].path.name}; "
                    "the shards are not of one model"
                )
        return first

    return read


def identical(groups: Sequence[Sequence[StoredTensor]]) -> ReadRows:
    """More shards than KV heads: each group of shards holds copies of the same heads. One copy of each, stacked.

    UserError on reading if the copies differ.
    """
    readers = [stack_rows(copies) for copies in zip(*groups, strict=True)]
    height = groups[0][0].shape[0]

    def read(start: int, stop: int) -> np.ndarray:
        first = readers[0](start, stop)
        for number, reader in enumerate(readers[1:], 1):
            apart = (reader(start, stop) != first).any(axis=1)
            if apart.any():
                group = groups[(start + int(apart.argmax())) // height]
                raise UserError(
                    f"{group[number].path}: {group[number].name} should repeat the KV heads of {group[0].path.name}, "
                    "but differs from them"
                )
        return first

    return read


def half_split(read: ReadRows, head_dim: int) -> ReadRows:
    """Reorder the rows of q or k from Meta's RoPE layout (pairs side by side) to Hugging Face's (two halves).

    Within each head, row `2 i + j` of Meta's becomes row `j * head_dim / 2 + i`.
    """

    def reordered(start: int, stop: int) -> np.ndarray:
        first_head, last_head = start // head_dim, -(-stop // head_dim)
        rows = read(first_head * head_dim, last_head * head_dim)
        # (heads, head_dim / 2, 2, columns) -> (heads, 2, head_dim / 2, columns)
        pairs = rows.reshape(last_head - first_head, head_dim // 2, 2, *rows.shape[1:])
        halves = pairs.swapaxes(1, 2).reshape(rows.shape)
        return halves[start - first_head * head_dim : stop - first_head * head_dim]

    return reordered


def _float32(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(DTYPES["F32"][0])
