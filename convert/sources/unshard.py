"""Reads whole tensors from the shards of a model-parallel checkpoint, with rows in Hugging Face's order.

In Meta's checkpoints fairscale's ColumnParallelLinear and VocabParallelEmbedding split axis 0, RowParallelLinear axis 1
(`models/llama3/model.py`). All readers return bits in a numpy array, as `StoredTensor.rows` does.
"""

from collections.abc import Callable, Sequence

import numpy as np

from convert.storage.stored_tensor import DTYPES, StoredTensor
from mlx_llama3.errors import UserError

ReadRows = Callable[[int, int], np.ndarray]
_REPLICA_TOLERANCE = 1e-2


def stack_rows(shards: Sequence[StoredTensor]) -> ReadRows:
    """Concatenate shards along axis 0: (rows, columns) each -> (len(shards) * rows, columns)."""
    height = shards[0].shape[0]

    def read(start: int, stop: int) -> np.ndarray:
        pieces = [
            shards[number].rows(max(start - number * height, 0), min(stop - number * height, height))
            for number in range(start // height, -(-stop // height))
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    return read


def join_columns(shards: Sequence[StoredTensor]) -> ReadRows:
    """Concatenate shards along axis 1: (rows, columns) each -> (rows, len(shards) * columns)."""

    def read(start: int, stop: int) -> np.ndarray:
        pieces = [shard.rows(start, stop) for shard in shards]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)

    return read


def first_if_equal(shards: Sequence[StoredTensor]) -> ReadRows:
    """Return the first of equal shards, for a vector that each holds whole.

    Reading raises `UserError` if they differ by more than 1e-2.
    """

    def read(start: int, stop: int) -> np.ndarray:
        first = shards[0].rows(start, stop)
        for other in shards[1:]:
            difference = np.abs(_float32(other.rows(start, stop), other.dtype) - _float32(first, shards[0].dtype))
            # `not (... <= ...)`, so that a NaN counts as different.
            if not np.all(difference <= _REPLICA_TOLERANCE):
                raise UserError(
                    f"{other.path}: {other.name} differs from that in {shards[0].path.name}; "
                    "the shards are not of one model"
                )
        return first

    return read


def drop_copies(groups: Sequence[Sequence[StoredTensor]]) -> ReadRows:
    """Concatenate one shard of each group along axis 0; the shards of a group are copies.

    With more shards than KV heads, several shards hold the same heads. Reading raises `UserError` if copies differ.
    """
    readers = [stack_rows(copies) for copies in zip(*groups, strict=True)]
    height = groups[0][0].shape[0]

    def read(start: int, stop: int) -> np.ndarray:
        first = readers[0](start, stop)
        for number, reader in enumerate(readers[1:], 1):
            differs = (reader(start, stop) != first).any(axis=1)
            if differs.any():
                group = groups[(start + int(differs.argmax())) // height]
                raise UserError(
                    f"{group[number].path}: {group[number].name} should repeat the KV heads of {group[0].path.name}, "
                    "but differs from them"
                )
        return first

    return read


def half_split(read: ReadRows, head_dim: int) -> ReadRows:
    """Reorder the rows of q or k from Meta's RoPE layout (adjacent pairs) to Hugging Face's (two halves).

    Within each head, Meta's row `2 i + j` becomes row `j * head_dim / 2 + i`.
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
