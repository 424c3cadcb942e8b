"""The layers of each rank of a pipeline."""

import pytest
from tiny_models import tiny_args

from benchmarks.parallel_fit import bytes_a_rank, known_args
from mlx_llama3.errors import UserError
from mlx_llama3.parallel.pipeline import layer_counts


def test_rank_0_has_fewer_layers_because_it_has_the_embedding_and_the_head():
    assert layer_counts(known_args("8B"), 2, "8B") == [14, 18]  # the ends are 4.8 layers
    assert layer_counts(known_args("405B"), 4, "405B") == [30, 32, 32, 32]


@pytest.mark.parametrize("size", ["8B", "70B", "405B"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ranks_hold_about_as_many_bytes(size: str, ranks: int):
    args = known_args(size)
    sizes = bytes_a_rank(args, ranks, 16, pipeline=True)
    layer = (sum(sizes) - 2 * 2 * args.vocab_size * args.dim) / args.n_layers
    assert max(sizes) <= sum(sizes) / ranks + layer


def test_every_rank_has_a_layer_even_if_the_ends_are_larger_than_all_layers():
    assert layer_counts(tiny_args(n_layers=3, vocab_size=100_000), 3, "model") == [1, 1, 1]


def test_more_ranks_than_layers_are_refused():
    with pytest.raises(UserError, match="model: 3 layers cannot be split over 4 ranks"):
        layer_counts(tiny_args(), 4, "model")
