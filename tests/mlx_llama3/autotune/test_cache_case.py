"""The trial of the cache in two buffers decodes tokens as a model does, and finds what is wrong."""

import pytest
from stand_in_device import StandIn
from tiny_models import random_weights, tiny_args, write_folder

from mlx_llama3.autotune import cache_case
from mlx_llama3.autotune.cache_case import CONTEXT, TOKENS, cache_cases
from mlx_llama3.autotune.trial import difference
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.model.cache.double_buffered import DoubleBufferedKVCache
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx

ARGS = tiny_args(max_seq_len=4096)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Transformer:
    return load_model(write_folder(tmp_path_factory.mktemp("model"), ARGS, random_weights(ARGS)))


def test_both_caches_decode_the_same_tokens_again_and_again(model) -> None:
    (case,) = cache_cases(model)
    device = StandIn()
    assert difference(case, device) is None
    (first,) = case.fused(*case.inputs)
    assert first.shape == (TOKENS,) and len(set(first.tolist())) > 1
    assert mx.array_equal(first, case.reference(*case.inputs)[0]).item()
    assert case.next_inputs(case.inputs, [first]) is case.inputs
    assert case.queued and f"{CONTEXT}" in case.label


@pytest.mark.parametrize("wrong", ["the latest position is not in the other buffer", "a token too few"])
def test_a_wrong_cache_is_found(model, monkeypatch, wrong) -> None:
    right = DoubleBufferedKVCache.update_and_fetch

    def update_and_fetch(cache: DoubleBufferedKVCache, kv: mx.array) -> tuple[mx.array, mx.array]:
        if wrong.startswith("the latest"):
            cache._shared = cache.offset
            return right(cache, kv)
        keys, values = right(cache, kv)
        return keys[:, :, :-1], values[:, :, :-1]

    monkeypatch.setattr(DoubleBufferedKVCache, "update_and_fetch", update_and_fetch)
    (case,) = cache_cases(model)
    assert "differs by" in difference(case, StandIn())


def test_two_tokens_are_in_flight(model, monkeypatch) -> None:
    """A token is read after the next one was queued, and before the one after that is built."""
    events = []
    forward, read = Transformer.__call__, mx.eval

    def built(model, tokens, start_pos, cache):
        events.append(f"build {start_pos - CONTEXT}")
        return forward(model, tokens, start_pos, cache)

    def evaluated(*arrays) -> None:
        events.append("read")
        read(*arrays)

    monkeypatch.setattr(Transformer, "__call__", built)
    (case,) = cache_cases(model)
    case.fused(*case.inputs)
    monkeypatch.setattr(mx, "eval", evaluated)
    events.clear()
    case.fused(*case.inputs)
    assert events == [event for n in range(TOKENS) for event in (f"build {n}", "read")] + ["read"]


def test_a_model_that_is_never_copied_is_not_tried(model, monkeypatch) -> None:
    monkeypatch.setattr(cache_case, "MOST_ELEMENTS", 1000)
    assert list(cache_cases(model)) == []
