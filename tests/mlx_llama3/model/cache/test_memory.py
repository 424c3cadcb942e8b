"""The memory of a context: as the caches really take it, and refused before it is too much."""

from types import SimpleNamespace

import pytest
from tiny_models import ARGS, tiny_args

from mlx_llama3.errors import UserError
from mlx_llama3.generation.stream import generate
from mlx_llama3.model.cache import memory as cache_memory
from mlx_llama3.model.cache.memory import bytes_a_token, check_context, context_bytes
from mlx_llama3.model.cache.settings import KV_BITS, CacheSettings
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.parallel.tensor import TensorPart
from mlx_llama3.system import memory

import mlx.core as mx  # isort: skip

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
    # Of a head of 128: words of keys and of values, and one for each group of 64, or of 32 numbers in 4 bits.
    assert bytes_a_token(LLAMA_8B, mx.bfloat16, CacheSettings(kv_bits=kv_bits)) == 32 * 8 * 4 * words


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("positions", [1, 256, 700])
def test_it_is_what_the_caches_hold(model, settings, positions) -> None:
    cache = model.make_cache(settings)
    mx.eval(model(mx.ones((1, positions), mx.int32), 0, cache))
    held = sum(array.nbytes for layer in cache for array in layer.state)
    assert context_bytes(model.args, mx.float32, positions, settings) == held


def test_counting_computes_nothing() -> None:
    mx.eval(mx.zeros(1))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for settings in SETTINGS:
        context_bytes(LLAMA_8B, mx.bfloat16, 131072, settings)
    assert mx.get_peak_memory() - before < 1e6


def test_only_what_is_new_counts(model, monkeypatch) -> None:
    cache = model.make_cache()
    mx.eval(model(mx.ones((1, 256), mx.int32), 0, cache))
    a_step = context_bytes(model.args, mx.float32, 256)
    monkeypatch.setattr(cache_memory, "free_memory", lambda: a_step)
    check_context(model, cache, 256)
    with pytest.raises(UserError, match="^a context of 513 tokens needs 0.0 GB of memory, 0.0 GB are available; "):
        check_context(model, cache, 257)
    offset = cache[0].offset
    assert offset == 256  # nothing was written


def test_of_shared_heads_only_those_of_this_machine_count(monkeypatch) -> None:
    model = TensorPart(SimpleNamespace(rank=0, size=2)).model(ARGS)
    monkeypatch.setattr(cache_memory, "free_memory", lambda: context_bytes(ARGS, mx.float32, 256) // 2)
    check_context(model, model.make_cache(), 256)
    with pytest.raises(UserError, match="^a context of 257 tokens"):
        check_context(model, model.make_cache(), 257)


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_fed(model, monkeypatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: context_bytes(model.args, mx.float32, 1024))
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)
    monkeypatch.setattr(Transformer, "residual", lambda *_: pytest.fail("it was fed"))
    with pytest.raises(UserError) as raised:
        next(generate(model, None, [1] * 1000, max_tokens=100))
    assert str(raised.value) == (
        "a context of 1100 tokens needs 0.0 GB of memory, 0.0 GB are available; shorten the prompt or the longest "
        "answer (--max-tokens), or keep the cache in fewer bits (--kv-bits 8)"
    )
    cache = model.make_cache(CacheSettings(kv_bits=8))
    with pytest.raises(UserError) as raised:
        next(generate(model, None, [1] * 8000, max_tokens=100, cache=cache))
    assert str(raised.value).endswith("; shorten the prompt or the longest answer (--max-tokens)")


def test_an_answer_as_long_as_the_context_asks_for_a_beginning_only(model, monkeypatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: context_bytes(model.args, mx.float32, 1024))
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)
    monkeypatch.setattr(Transformer, "residual", lambda *_: pytest.fail("fed"))
    with pytest.raises(AttributeError):  # it goes on, to a tokenizer that is not there
        next(generate(model, None, [1] * 700, max_tokens=99_300))
    with pytest.raises(UserError, match="^a context of 1256 tokens"):
        next(generate(model, None, [1] * 1000, max_tokens=99_000))


def test_on_a_mac_the_weights_are_not_free(monkeypatch) -> None:
    def working_set(device: mx.Device | None = None) -> dict:
        """Of the GPU; by default of the device that is in use, which may be the processor."""
        return {"max_recommended_working_set_size": 10**9} if device == mx.gpu else {"device_name": "M9"}

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", working_set)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 4 * 10**8)
    assert memory.free_memory() == 6 * 10**8
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2 * 10**9)
    assert memory.free_memory() == 0


def test_tiny_context_needs_no_memory_to_speak_of() -> None:
    model = Transformer(ARGS)
    check_context(model, model.make_cache(), ARGS.max_seq_len)
