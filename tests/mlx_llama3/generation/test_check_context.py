"""A context that does not fit into memory is refused before prefill."""

from types import SimpleNamespace

import pytest
from tiny_models import ARGS, tiny_args

from mlx_llama3.errors import UserError
from mlx_llama3.generation import stream
from mlx_llama3.generation.stream import check_context, generate
from mlx_llama3.model.cache.double_buffered import DoubleBufferedKVCache
from mlx_llama3.model.cache.memory import context_bytes
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.parallel.tensor import TensorShard
from mlx_llama3.system import memory

import mlx.core as mx


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(tiny_args(max_seq_len=100_000, head_dim=64))


def test_only_what_is_new_counts(model, monkeypatch) -> None:
    cache = model.make_cache()
    mx.eval(model(mx.ones((1, 256), mx.int32), 0, cache))
    a_step = context_bytes(model.args, mx.float32, 256)
    monkeypatch.setattr(stream, "free_memory", lambda: a_step)
    check_context(model, cache, 256)
    with pytest.raises(UserError, match="^a context of 513 tokens needs 0.0 GB of memory, 0.0 GB are available; "):
        check_context(model, cache, 257)
    offset = cache[0].offset
    assert offset == 256  # nothing was written


def test_a_cache_of_two_buffers_needs_both_and_is_told_of_fewer_bits(model, monkeypatch) -> None:
    monkeypatch.setattr(stream, "free_memory", lambda: context_bytes(model.args, mx.float32, 256) * 3 // 2)
    check_context(model, model.make_cache(), 256)
    with pytest.raises(UserError, match=r"or keep the cache in fewer bits \(--kv-bits 8\)$"):
        check_context(model, [DoubleBufferedKVCache() for _ in model.layers], 256)


def test_under_tensor_parallelism_only_the_heads_of_this_rank_count(monkeypatch) -> None:
    model = TensorShard(SimpleNamespace(rank=0, size=2)).model(ARGS)
    monkeypatch.setattr(stream, "free_memory", lambda: context_bytes(ARGS, mx.float32, 256) // 2)
    check_context(model, model.make_cache(), 256)
    with pytest.raises(UserError, match="^a context of 257 tokens"):
        check_context(model, model.make_cache(), 257)


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_fed(model, monkeypatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: context_bytes(model.args, mx.float32, 1024))
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)  # what a Mac subtracts
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


def test_an_answer_limited_by_the_context_needs_memory_for_its_beginning_only(model, monkeypatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: context_bytes(model.args, mx.float32, 1024))
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)  # what a Mac subtracts
    monkeypatch.setattr(Transformer, "residual", lambda *_: pytest.fail("fed"))
    with pytest.raises(AttributeError):  # the check passes, and the missing tokenizer is used next
        next(generate(model, None, [1] * 700, max_tokens=99_300))
    with pytest.raises(UserError, match="^a context of 1256 tokens"):
        next(generate(model, None, [1] * 1000, max_tokens=99_000))


def test_tiny_context_needs_almost_no_memory() -> None:
    model = Transformer(ARGS)
    check_context(model, model.make_cache(), ARGS.max_seq_len)
