"""The computed memory of a context against what the caches really take."""

import pytest
from tiny_models import tiny_args

from mlx_llama3.model.cache.memory import bytes_a_token, context_bytes
from mlx_llama3.model.cache.settings import KV_BITS, CacheSettings
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx

LLAMA_8B = ModelArgs(4096, 32, 32, 8, 128, 14336, 128256, 1e-5, 500000.0, 131072)
SETTINGS = [CacheSettings(), *(CacheSettings(kv_bits=bits) for bits in KV_BITS), CacheSettings(max_kv_size=300)]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(tiny_args(max_seq_len=100_000, head_dim=64))


def test_a_token_of_llama_8b_takes_128_kib() -> None:
    # 2 (keys and values) * 32 layers * 8 heads * 128 numbers * 2 bytes
    assert bytes_a_token(LLAMA_8B, mx.bfloat16) == 131072
    assert context_bytes(LLAMA_8B, mx.bfloat16, 131072) == 2**34
    assert context_bytes(LLAMA_8B, mx.bfloat16, 1) == 256 * 131072  # the buffer grows by 256 positions


@pytest.mark.parametrize(("kv_bits", "words"), [(4, 32 + 16 + 2 + 4), (8, 32 + 32 + 2 + 2)])
def test_fewer_bits_take_less(kv_bits, words) -> None:
    # With head_dim 128: words of a key and of a value, and one word for each group (64 numbers; 32 for 4-bit values).
    assert bytes_a_token(LLAMA_8B, mx.bfloat16, CacheSettings(kv_bits=kv_bits)) == 32 * 8 * 4 * words


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("positions", [1, 256, 700])
def test_it_is_what_the_caches_hold(model, settings, positions) -> None:
    cache = model.make_cache(settings)
    mx.eval(model(mx.ones((1, positions), mx.int32), 0, cache))
    nbytes = sum(array.nbytes for layer in cache for array in layer.state)
    assert context_bytes(model.args, mx.float32, positions, settings) == nbytes


def test_counting_computes_nothing() -> None:
    mx.eval(mx.zeros(1))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for settings in SETTINGS:
        context_bytes(LLAMA_8B, mx.bfloat16, 131072, settings)
    assert mx.get_peak_memory() - before < 1e6
