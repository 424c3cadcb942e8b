"""The cache in two buffers holds what a plain one holds, whatever is appended and trimmed."""

import numpy as np
import pytest
from tiny_models import tiny_args

from mlx_llama3.model.cache.double_buffered import DoubleBufferedKVCache
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.memory import layer_bytes
from mlx_llama3.model.cache.settings import DEFAULT, CacheSettings, make_layers
from mlx_llama3.model.kernels.kernel_set import Kernels, Rows

import mlx.core as mx

Both = tuple[DoubleBufferedKVCache, KVCache]


def append(caches: Both, kv: mx.array) -> None:
    """Append to both caches, and compare all that they return."""
    results = [np.array(mx.stack(cache.update_and_fetch(kv))) for cache in caches]
    np.testing.assert_array_equal(*results)
    assert caches[0].offset == caches[1].offset


def block(length: int, seed: int) -> mx.array:
    return mx.random.normal((2, 1, 2, length, 4), key=mx.random.key(seed))


def caches_with(*lengths: int) -> Both:
    caches = DoubleBufferedKVCache(), KVCache()
    for seed, length in enumerate(lengths):
        append(caches, block(length, seed))
    return caches


def test_it_returns_what_a_plain_cache_does_across_growth():
    caches_with(3, 1, 1, 249, 1, 1, 1, 256, 1, 700, 1, 1)


@pytest.mark.parametrize("seed", range(6))
def test_it_holds_what_a_plain_cache_does_after_passes_and_trims(seed):
    """Prompts, drafts of which some are trimmed, single tokens, trims far back, prefixes that go on."""
    random, caches = np.random.default_rng(seed), (DoubleBufferedKVCache(), KVCache())
    for step in range(60):
        length = int(random.choice([1, 1, 1, 5, 8, 130]))
        append(caches, block(length, 1000 * seed + step))
        dropped = int(random.choice([0, 0, 0, 1, length - 1, length, min(caches[1].offset, 150)]))
        for cache in caches:
            cache.trim(dropped)
        if random.random() < 0.1:
            count = int(random.integers(1, caches[1].offset + 1)) if caches[1].offset else 0
            caches = caches[0].prefix(count), caches[1].prefix(count)


def test_the_position_that_a_buffer_lacks_is_what_makes_it_right(monkeypatch):
    def without_catching_up(cache: DoubleBufferedKVCache, kv: mx.array) -> tuple[mx.array, mx.array]:
        cache._shared = cache.offset
        return right(cache, kv)

    right = DoubleBufferedKVCache.update_and_fetch
    monkeypatch.setattr(DoubleBufferedKVCache, "update_and_fetch", without_catching_up)
    caches_with(5, 1)
    with pytest.raises(AssertionError):
        caches_with(5, 1, 1)


def test_a_prefix_and_its_origin_are_independent():
    caches = caches_with(10, 1, 1)
    prefixes = caches[0].prefix(11), caches[1].prefix(11)
    for seed in range(4):
        append(prefixes, block(1, 20 + seed))
        append(caches, block(1, 30 + seed))


def test_a_file_of_either_form_fills_the_other():
    double, plain = caches_with(300, 1, 1)
    double.trim(1)
    plain.trim(1)
    assert double.tensors().keys() == plain.tensors().keys() == {"kv"}
    assert mx.array_equal(double.tensors()["kv"], plain.tensors()["kv"]).item()
    restored = DoubleBufferedKVCache(), KVCache()
    append(restored, block(3, 7))  # what a cache held before does not show
    for cache, source in zip(restored, (plain, double), strict=True):
        cache.restore(source.tensors(), source.offset)
    for seed in range(3):
        append(restored, block(1, 40 + seed))


def test_a_trim_of_more_than_it_holds_is_refused_and_changes_nothing():
    caches = caches_with(4, 1, 1)
    with pytest.raises(ValueError, match="cannot trim 7 positions of a cache that holds 6"):
        caches[0].trim(7)
    append(caches, block(1, 9))


def test_two_buffers_only_up_to_a_size(monkeypatch):
    """The sizes of buffers of 256 and of 512 positions, `(2, 1, 2, positions, 4)`."""
    monkeypatch.setattr(DoubleBufferedKVCache, "MOST", 256 * 16)
    cache, plain = caches_with(250, 1, 1)
    assert len(cache.state) == 2 and len(DoubleBufferedKVCache().state) == 0
    for seed in range(10):
        append((cache, plain), block(1, 50 + seed))
    assert [array.shape[3] for array in cache.state] == [512]


@pytest.mark.parametrize(
    ("settings", "rows", "expected"),
    [
        (DEFAULT, Rows.ONE, True),
        (DEFAULT, Rows.ALL, True),
        (DEFAULT, Rows.FEW | Rows.MANY, False),
        (CacheSettings(max_kv_size=300), Rows.ALL, False),
        (CacheSettings(kv_bits=8), Rows.ALL, False),
    ],
    ids=str,
)
def test_only_a_plain_cache_has_two_buffers_and_only_if_they_are_chosen(settings, rows, expected):
    layers = make_layers(settings, tiny_args(head_dim=64), Kernels(double_buffer=rows))
    assert {isinstance(layer, DoubleBufferedKVCache) for layer in layers} == {expected}


@pytest.mark.parametrize("positions", [1, 255, 256, 257, 700])
def test_both_buffers_are_counted(positions):
    args = tiny_args(max_seq_len=1000)
    cache = DoubleBufferedKVCache()
    shape = (2, 1, args.n_kv_heads, 1, args.head_dim)
    for _ in range(positions):
        cache.update_and_fetch(mx.zeros(shape))
    assert layer_bytes(cache, args, mx.float32, positions) == sum(array.nbytes for array in cache.state)
    assert layer_bytes(cache, args, mx.float32, positions) == 2 * layer_bytes(KVCache(), args, mx.float32, positions)
