"""Whether a cache is copied while two tokens are in flight: on the CPU, and in the model of a Mac."""

from dataclasses import replace

import pytest

from benchmarks.cache_copies import buffers_at_peak
from benchmarks.command_buffers import CHIPS, LAYERS_AND_VOCAB, decoding
from mlx_llama3.model.cache.double_buffered import DoubleBufferedKVCache
from mlx_llama3.model.cache.kv_cache import KVCache

import mlx.core as mx

BASE, MAX = CHIPS[0], CHIPS[2]


@pytest.fixture(autouse=True)
def no_freed_buffers():
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


@pytest.mark.parametrize("n_layers", [1, 3])
def test_with_two_tokens_in_flight_a_plain_cache_is_copied_and_one_of_two_buffers_is_not(n_layers):
    def peak(make, in_flight: int) -> float:
        return buffers_at_peak(make, n_layers, in_flight=in_flight, positions=2048)

    assert peak(KVCache, 1) == pytest.approx(1, abs=0.2)
    assert peak(KVCache, 2) > 1.8
    assert peak(DoubleBufferedKVCache, 1) == pytest.approx(2, abs=0.2)
    assert peak(DoubleBufferedKVCache, 2) == pytest.approx(2, abs=0.2)


def test_the_model_copies_every_layer_where_nothing_makes_the_host_wait():
    """1B fills four command buffers a token, so none of the token before has to be finished."""
    instant = replace(BASE, encode=0.0, build=0.0)
    one = decoding("1B", instant, 1023)
    assert one.copied_layers == 16
    heads, head_dim, read_and_written = 8, 64, 2
    assert one.copied == 16 * read_and_written * 2 * heads * head_dim * 1024 * 2
    assert one.cache == 16 * 2 * heads * head_dim * 1023 * 2
    assert one.ratio == pytest.approx(1 + one.copied / (one.weights + one.cache))


@pytest.mark.parametrize("name", LAYERS_AND_VOCAB)
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_the_model_copies_nothing_of_what_was_used_two_tokens_ago(name, chip):
    for host in (chip, replace(chip, encode=0.0, build=0.0)):
        for positions in (100, 4000, 16000):
            assert decoding(name, host, positions, apart=2).copied == 0
            assert decoding(name, host, positions, in_flight=1).copied == 0


def test_the_model_copies_nothing_where_a_token_fills_more_command_buffers_than_may_be_unfinished():
    assert decoding("8B", MAX, 1000).buffers > 11 and decoding("8B", MAX, 1000).copied == 0
    endless = replace(MAX, operations=1 << 30, elements=1 << 50)
    assert decoding("8B", endless, 1000).copied_layers == 32


def test_the_model_copies_less_on_a_chip_that_is_done_sooner():
    layers = [decoding("1B", replace(BASE, bandwidth=bandwidth), 4000).copied_layers for bandwidth in (1e11, 1e12)]
    assert layers[0] > layers[1]
