"""Prefilling a long prompt takes the memory of its cache and of one chunk, not of the whole prompt at once."""

import pytest
from tiny_models import tiny_args, tiny_model

from mlx_llama3.generation.decoding import prefill

import mlx.core as mx

CHUNK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"), tiny_args(max_seq_len=8192))


def peak(model, length: int, chunk: int) -> tuple[int, int]:
    """(peak bytes of a prefill, bytes of the cache after it)"""
    cache = model.make_cache()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(prefill(model, [i % 300 for i in range(length)], cache, chunk=chunk), [layer.state for layer in cache])
    return mx.get_peak_memory() - before, sum(array.nbytes for layer in cache for array in layer.state)


def test_the_peak_grows_with_the_cache_alone(model):
    """Beside the cache it may hold one layer's old buffer while that grows and, without fused attention, the scores of
    one chunk, their masked copy and their softmax."""
    (small, small_cache), (large, large_cache) = (peak(model, length, CHUNK) for length in (1024, 4096))
    scores = 3 * CHUNK * model.args.n_heads * 4 * (4096 - 1024)
    old_buffer = large_cache / model.args.n_layers
    assert large - small <= (large_cache - small_cache) + old_buffer + scores
    assert peak(model, 2048, 2048)[0] > 2 * large  # in a single chunk
