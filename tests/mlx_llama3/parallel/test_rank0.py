"""What rank 0 broadcasts to the workers, and when it broadcasts nothing."""

import gc
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import tiny_args

from mlx_llama3.errors import UserError
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.parallel import rank0
from mlx_llama3.parallel.rank0 import Rank0, Rank0Transformer, Ticket

import mlx.core as mx

TOKENS = mx.array([[1, 2, 3]])


class Recorder:
    """A world without workers that records the messages of rank 0."""

    size = 2

    def __init__(self) -> None:
        self.together, self.messages = False, []
        self.connections = SimpleNamespace(finish=lambda last: last())

    def broadcast(self, message: dict[str, Any]) -> None:
        assert self.together
        self.messages.append(message)

    def from_rank0(self, x: mx.array) -> mx.array:
        assert self.together
        return x

    def agree(self, error: str = "") -> str:
        return error


@pytest.fixture
def world() -> Recorder:
    return Recorder()


@pytest.fixture
def model(world: Recorder) -> Rank0Transformer:
    model = Rank0Transformer(tiny_args(), Rank0(world))
    model._ticket = Ticket(100)
    return model


def test_a_pass_is_broadcast_once_whatever_it_calls(world: Recorder, model: Rank0Transformer):
    cache = model.make_cache(CacheSettings(max_kv_size=8))
    model(TOKENS, 0, cache)
    model.residual(TOKENS[:, :1], 3, cache)
    model.head(mx.zeros((2, 64)))
    settings = {"kv_bits": None, "max_kv_size": 8, "kv_keep": 4}
    assert world.messages == [
        {"op": "logits", "model": 100, "shape": (1, 3), "at": 0, "cache": 1, "settings": settings},
        {"op": "residual", "model": 100, "shape": (1, 1), "at": 3, "cache": 1},
        {"op": "head", "model": 100, "shape": (2, 64), "dtype": "float32"},
    ]
    assert not world.together


def test_a_prefix_is_its_own_cache_and_both_are_dropped_when_they_are_gone(world: Recorder, model: Rank0Transformer):
    cache = model.make_cache()
    model(TOKENS, 0, cache)
    copy = [entry.prefix(2) for entry in cache]
    model(TOKENS[:, :1], 2, copy)
    model(TOKENS[:, :1], 3, cache)
    assert [(message["cache"], message.get("of")) for message in world.messages] == [(1, None), (2, 1), (1, None)]
    del cache, copy
    gc.collect()
    model(TOKENS)
    assert sorted(world.messages[-1]["drop"]) == [1, 2] and "cache" not in world.messages[-1]
    model(TOKENS)
    assert "drop" not in world.messages[-1]


def test_errors_are_raised_before_anything_is_broadcast(world: Recorder, model: Rank0Transformer):
    with pytest.raises(ValueError, match="start_pos is 2"):
        model(TOKENS, 2, model.make_cache())
    with pytest.raises(ValueError, match="tokens have shape"):
        model(TOKENS[0])
    with pytest.raises(UserError, match="do not have this cache"):
        model(TOKENS, 0, [KVCache() for _ in model.layers])
    filled = model.make_cache()
    for entry in filled:
        entry.update_and_fetch(mx.zeros((2, 1, 2, 5, 16)))
    with pytest.raises(UserError, match="do not have this cache"):
        model(TOKENS, 5, filled)
    assert world.messages == []


def test_ctrl_c_waits_until_the_pass_is_queued(world: Recorder, model: Rank0Transformer):
    def press(x: mx.array) -> mx.array:
        signal.raise_signal(signal.SIGINT)
        return x

    cache = model.make_cache()
    world.from_rank0 = press
    with pytest.raises(KeyboardInterrupt):
        model(TOKENS, 0, cache)
    assert [entry.offset for entry in cache] == [3, 3, 3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    model._rank0.end()
    assert world.messages[-1]["op"] == "end"


def test_ctrl_c_before_a_broadcast_leaves_the_cache_new(world: Recorder, model: Rank0Transformer, monkeypatch):
    cache, gone = model.make_cache(), model.make_cache()
    model(TOKENS, 0, gone)
    del gone
    gc.collect()
    with monkeypatch.context() as pressed:
        pressed.setattr(rank0, "_uninterrupted", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(TOKENS, 0, cache)
    model(TOKENS, 0, cache)
    first, then = world.messages
    assert "settings" in then and then["drop"] == [first["cache"]]


def test_after_an_error_inside_a_pass_nothing_more_is_broadcast(world: Recorder, model: Rank0Transformer):
    def fail(x: mx.array) -> mx.array:
        raise MemoryError

    world.from_rank0 = fail
    with pytest.raises(MemoryError):
        model(TOKENS)
    with pytest.raises(UserError, match="a pass has failed, .*; start all ranks again"):
        model(TOKENS)
    model._rank0.end()
    assert [message["op"] for message in world.messages] == ["logits"]
