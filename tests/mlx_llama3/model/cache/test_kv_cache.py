"""The plain KV cache: appending, growth in steps, trimming, prefixes; and the check of `start_pos`."""

import numpy as np
import pytest

from mlx_llama3.model.cache.kv_cache import KVCache, check_start

import mlx.core as mx


def block(start: int, length: int) -> mx.array:
    """Keys and values `(2, 1, 2, length, 4)`: a key is its position, a value its position + 0.5."""
    positions = mx.arange(start, start + length, dtype=mx.float32)[None, None, :, None]
    keys = mx.broadcast_to(positions, (1, 2, length, 4))
    return mx.stack([keys, keys + 0.5])


def test_returns_everything_so_far_across_growth():
    cache, start = KVCache(), 0
    for length in (3, 1, 1, 300, 1, 256, 700):
        keys, values = cache.update_and_fetch(block(start, length))
        start += length
        assert cache.offset == start
        expected_keys, expected_values = block(0, start)
        np.testing.assert_array_equal(np.array(keys), np.array(expected_keys))
        np.testing.assert_array_equal(np.array(values), np.array(expected_values))


def test_grows_in_steps_not_with_each_token():
    cache = KVCache()
    sizes = set()
    for i in range(600):
        cache.update_and_fetch(block(i, 1))
        sizes.add(cache.state[0].shape[3])
    assert sizes == {256, 512, 768}


def test_trim_then_overwrite():
    cache = KVCache()
    cache.update_and_fetch(block(0, 10))
    cache.trim(4)
    keys, _ = cache.update_and_fetch(block(100, 2))
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 100, 101]
    cache.trim(8)
    assert cache.offset == 0
    for count in (-1, 1):
        with pytest.raises(ValueError, match="trim"):
            cache.trim(count)


def test_a_prefix_and_its_origin_are_independent():
    cache = KVCache()
    cache.update_and_fetch(block(0, 10))
    prefix = cache.prefix(5)
    keys, _ = prefix.update_and_fetch(block(100, 2))
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 100, 101]
    keys, _ = cache.fetch()
    assert keys[0, 0, :, 0].tolist() == list(range(10))


def test_a_restored_cache_can_be_extended():
    cache, restored = KVCache(), KVCache()
    cache.update_and_fetch(block(0, 300))
    cache.trim(20)
    restored.restore(cache.tensors(), cache.offset)
    keys, values = restored.update_and_fetch(block(280, 3))
    assert restored.offset == 283
    assert keys[0, 0, :, 0].tolist() == list(range(283))
    assert (values - keys == 0.5).all().item()


def test_start_pos_must_be_where_the_cache_ends():
    cache = [KVCache(), KVCache()]
    check_start(cache, 0, 2)
    for entry in cache:
        entry.update_and_fetch(block(0, 5))
    check_start(cache, 5, 2)
    with pytest.raises(ValueError, match="start_pos is 0 but the cache of layer 0 holds 5"):
        check_start(cache, 0, 2)
    cache[1].trim(1)
    with pytest.raises(ValueError, match="layer 1 holds 4"):
        check_start(cache, 5, 2)
    with pytest.raises(ValueError, match="no cache"):
        check_start(None, 3, 2)
    with pytest.raises(ValueError, match="2 layers"):
        check_start(cache, 5, 3)
