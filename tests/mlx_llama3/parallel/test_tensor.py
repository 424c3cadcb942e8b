"""The rows and columns of each rank: together they are the whole, and some models cannot be split."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import quantized, random_weights, tiny_args, write_folder

from mlx_llama3.checkpoint.folder import Checkpoint
from mlx_llama3.checkpoint.tensor_shapes import expected_shapes
from mlx_llama3.errors import UserError
from mlx_llama3.parallel.slices import COLUMNS
from mlx_llama3.parallel.tensor import TensorShard, VocabularyParallel, even_bounds, shard_of

import mlx.core as mx


def as_rank(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, size=size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_shards_of_all_ranks_are_the_whole(size: int, tmp_path: Path):
    args = tiny_args(n_heads=12, n_kv_heads=12, vocab_size=323, hidden_dim=160)
    weights = random_weights(args)
    folder = write_folder(tmp_path / "model", args, weights)
    parts = [TensorShard(as_rank(rank, size)).checkpoint(folder) for rank in range(size)]
    for name in expected_shapes(args):
        shard = shard_of(name, Checkpoint(folder), 0, size)
        read = [part.pop(name) for part in parts]
        if shard is None:
            assert all(mx.array_equal(each, weights[name]) for each in read)
        else:
            assert mx.array_equal(mx.concatenate(read, axis=shard.axis), weights[name])
    by_columns = [name for name in expected_shapes(args) if (shard := shard_of(name, Checkpoint(folder), 0, size))
                  and shard.axis == COLUMNS]  # fmt: skip
    assert {name.split(".")[-2] for name in by_columns} == {"o_proj", "down_proj"}


def test_a_model_has_the_heads_of_its_rank():
    model = TensorShard(as_rank(1, 2)).model(tiny_args())
    assert {(block.attention.n_heads, block.attention.n_kv_heads) for block in model.layers} == {(2, 1)}
    assert model.args.n_heads == 4


def test_groups_are_distributed_unevenly_but_never_split(tmp_path: Path):
    args = tiny_args(hidden_dim=160)
    folder = write_folder(
        tmp_path / "model", args, quantized(random_weights(args)), quantization={"bits": 4, "group_size": 32}
    )
    columns = [shard_of("model.layers.1.mlp.down_proj.weight", Checkpoint(folder), rank, 2) for rank in range(2)]
    assert [(shard.start, shard.end) for shard in columns] == [(0, 64), (64, 160)]
    rows = [shard_of("model.layers.1.mlp.up_proj.weight", Checkpoint(folder), rank, 2) for rank in range(2)]
    assert [(shard.start, shard.end) for shard in rows] == [(0, 64), (64, 160)]


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "4 query heads and 2 KV heads cannot be split evenly over 3 ranks.*--pipeline"),
        ({"n_kv_heads": 4}, 4, "o_proj has groups of 32 weights, which 4 ranks would split at 16"),
        ({"hidden_dim": 32, "head_dim": 32}, 2, "down_proj has fewer than 2 groups of 32 weights"),
    ],
)
def test_what_cannot_be_split_is_refused(changes: dict, size: int, message: str, tmp_path: Path):
    args = tiny_args(**changes)
    folder = write_folder(
        tmp_path / "model", args, quantized(random_weights(args)), quantization={"bits": 4, "group_size": 32}
    )
    with pytest.raises(UserError, match=message):
        TensorShard(as_rank(0, size)).checkpoint(folder)


@pytest.mark.parametrize("rows", [6, 7, 8])
def test_an_embedding_of_any_number_of_rows_adds_up(rows: int):
    table = mx.random.normal((rows, 3), key=mx.random.key(rows))
    tokens, bounds = mx.array([list(range(rows))]), even_bounds(rows, 4)
    rank = SimpleNamespace(sum=lambda x: x)
    total = mx.zeros((1, rows, 3))
    for number in range(4):
        rank.rank = number
        part = _Rows(table[bounds[number] : bounds[number + 1]])
        total = total + VocabularyParallel(part, bounds, rank)(tokens)
    assert np.array_equal(np.array(total[0]), np.array(table))


class _Rows:
    """An embedding."""

    def __init__(self, table: mx.array) -> None:
        self._table = table

    def __call__(self, tokens: mx.array) -> mx.array:
        return self._table[tokens]

    def as_linear(self, x: mx.array) -> mx.array:
        return x @ self._table.T
