"""The computed bytes per rank match real shards, and docs/distributed.md has the computed tables."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import quantized, random_weights, tiny_args, write_folder

from benchmarks.parallel_fit import bytes_a_rank, cache_bytes_a_rank, known_args, largest, tables
from mlx_llama3.errors import UserError
from mlx_llama3.parallel.pipeline import PipelineShard
from mlx_llama3.parallel.tensor import TensorShard

import mlx.core as mx

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
ARGS = tiny_args(dim=128, n_heads=8, n_kv_heads=4, head_dim=64, hidden_dim=320, vocab_size=321)


@pytest.mark.parametrize("shard", [TensorShard, PipelineShard])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_the_bytes_are_those_of_the_shards(shard: type, bits: int, tmp_path: Path):
    weights = {name: weight.astype(mx.bfloat16) for name, weight in random_weights(ARGS).items()}
    settings = {}
    if bits < 16:
        weights = quantized(weights, bits=bits, group_size=64)
        settings = {"quantization": {"bits": bits, "group_size": 64}}
    folder = write_folder(tmp_path / "model", ARGS, weights, **settings)
    nbytes = [shard(SimpleNamespace(rank=rank, size=2)).checkpoint(folder).nbytes for rank in range(2)]
    assert nbytes == bytes_a_rank(ARGS, 2, bits, pipeline=shard is PipelineShard)


def test_a_cache_is_two_numbers_of_16_bits_for_each_head_and_token():
    # 8B: 32 layers, 8 KV heads of 128, keys and values: 128 KiB per token
    assert cache_bytes_a_rank(known_args("8B"), 1, 1) == 128 << 10
    assert cache_bytes_a_rank(known_args("8B"), 4, 8192) == 1 << 28


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(UserError, match="cannot be split evenly over 16 ranks"):
        bytes_a_rank(known_args("405B"), 16, 4)


def test_the_page_has_the_tables_as_they_are_computed():
    page = PAGE.read_text(encoding="utf-8")
    for table in tables():
        assert table in page


def test_what_fits_leaves_room_for_the_system_and_a_context():
    assert largest(64, 1) == "70B, 4 bits"  # 37.0 GiB, and 2.5 GiB for the context, of 48 GiB
    assert largest(36, 1) == "8B, 16 bits" and largest(36, 2) == "70B, 4 bits"
    assert largest(8, 1) == "none"
