"""Batched answers equal those of single runs, and the batched cache gives the logits of each row alone."""

import numpy as np
import pytest
from tiny_models import tiny_args, tiny_model

from mlx_llama3.errors import UserError
from mlx_llama3.generation import batch as batches
from mlx_llama3.generation.batch import Answer, Request, _Row, generate_batch, largest_batch
from mlx_llama3.generation.sampling import Sampling
from mlx_llama3.generation.stream import generate
from mlx_llama3.model.cache.batch import BatchKVCache, Rows, joined, selected

import mlx.core as mx

LOGITS = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"), tiny_args(max_seq_len=200))


def ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, length).tolist()


def alone(model, tokenizer, request: Request) -> Answer:
    sampling = request.sampling
    steps = list(
        generate(
            model,
            tokenizer,
            request.ids,
            max_tokens=request.max_tokens,
            stop=request.stop,
            **{name: getattr(sampling, name) for name in sampling.__dataclass_fields__},
        )
    )
    return Answer([step.token for step in steps], "".join(step.text for step in steps), steps[-1].finish_reason)


REQUESTS = [
    Request(ids(5, 0), 12),
    Request(ids(40, 1), 3),
    Request(ids(1, 2), 30, sampling=Sampling(temperature=1.0, seed=7)),
    Request(ids(17, 3), 1),
    Request(ids(90, 4), 25, sampling=Sampling(temperature=0.9, top_k=20, top_p=0.9, seed=8, repetition_penalty=1.2)),
    Request(ids(6, 5), 20, sampling=Sampling(frequency_penalty=2.0)),
    Request(ids(33, 6), 9, sampling=Sampling(logit_bias={5: 1e6})),
    Request(ids(8, 7), 16, sampling=Sampling(temperature=2.0, min_p=0.01, seed=8)),
    Request(ids(195, 8), 50),  # the context of 200 ends it
    Request(ids(64, 9), 12),
]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 10, 50])
@pytest.mark.parametrize("chunk", [7, 512])
def test_rows_equal_single_runs(model, llama31, batch_size, chunk):
    answers = dict(generate_batch(model, llama31, REQUESTS, batch_size=batch_size, prefill_chunk=chunk))
    assert sorted(answers) == list(range(len(REQUESTS)))
    for index, request in enumerate(REQUESTS):
        assert answers[index] == alone(model, llama31, request), index
    assert len(answers[8].tokens) == 5


def test_stops_are_each_rows_own(model, llama31):
    """A stop string stops only the row that has it; a stop id ends the answer of any row."""
    plain = alone(model, llama31, Request(ids(5, 0), 12))
    stop = plain.text[len(plain.text) // 2 :][:2]
    requests = [Request(ids(5, 0), 12, stop=(stop,)), Request(ids(5, 0), 12)]
    first, second = (answer for _, answer in sorted(generate_batch(model, llama31, requests)))
    assert first == alone(model, llama31, requests[0])
    assert stop not in first.text and first.finish_reason == "stop"
    assert second == plain


def feed(model, rows: list[list[int]]) -> tuple[mx.array, list[BatchKVCache]]:
    """One pass over left-padded rows: logits `(B, S, vocab)` and the cache."""
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    shared = Rows(padding)
    cache = [BatchKVCache(shared) for _ in model.layers]
    tokens = mx.array([[0] * p + row for p, row in zip(padding, rows, strict=True)])
    return model(tokens, 0, cache), cache


def test_padding_changes_no_logit(model):
    rows = [ids(length, length) for length in (1, 30, 12)]
    logits, cache = feed(model, rows)
    assert not mx.isnan(logits).any().item()
    for place, row in enumerate(rows):
        expected = model(mx.array([row]))[0]
        assert mx.abs(logits[place, -len(row) :] - expected).max().item() < LOGITS
    # One more token for each row, after one row left the batch and others, shorter and longer, joined it.
    cache = selected(cache, [0, 2])
    rows = [rows[0], rows[2]]
    assert cache[0].offset == 12
    for new in (ids(3, 50), ids(77, 51)):
        _, more = feed(model, [new])
        cache, rows = joined(cache, more), [*rows, new]
        following = ids(len(rows), len(rows))
        logits = model(mx.array(following)[:, None], cache[0].offset, cache)
        rows = [[*row, token] for row, token in zip(rows, following, strict=True)]
        for place, row in enumerate(rows):
            assert mx.abs(logits[place, 0] - model(mx.array([row]))[0, -1]).max().item() < LOGITS


def test_a_row_that_is_alone_again_has_no_padding(model):
    _, cache = feed(model, [ids(4, 0), ids(50, 1)])
    cache = selected(cache, [0])
    assert cache[0].offset == 4 and cache[0].rows.padding == [0]


def test_those_of_like_length_go_together_and_none_waits_forever(model, llama31):
    requests = [Request(ids(length, length), 1) for length in (10, 90, 11, 91, 12, 92)]
    order = [index for index, _ in generate_batch(model, llama31, requests, batch_size=3)]
    assert order == [0, 2, 4, 1, 3, 5]


def test_bad_requests_are_refused(model, llama31):
    for request, said in (
        (Request([], 5), "prompt is empty"),
        (Request([320], 5), "not in the vocabulary"),
        (Request(ids(200, 0), 5), "no room"),
        (Request([1], 0), "max_tokens is 0"),
    ):
        with pytest.raises(UserError, match=said):
            list(generate_batch(model, llama31, [Request([1], 1), request]))
    for wrong in ({"batch_size": 0}, {"prefill_chunk": 0}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))} is 0"):
            list(generate_batch(model, llama31, [Request([1], 1)], **wrong))


def test_nan_names_the_layer(tmp_path, llama31):
    model = tiny_model(tmp_path)
    model.layers[1].feed_forward.w2.weight = model.layers[1].feed_forward.w2.weight * mx.nan
    with pytest.raises(UserError, match="NaN, first in layers.1.feed_forward"):
        list(generate_batch(model, llama31, [Request([1, 2], 3), Request([3], 3)]))


def test_memory_bounds_the_batch(model, monkeypatch):
    requests = [Request(ids(100, 0), 50), Request(ids(10, 1), 500)]  # 200 positions at most, in a buffer of 256
    row = 256 * 2 * 3 * 2 * 16 * 4  # positions, keys and values, layers, heads, head_dim, bytes
    for free, expected in ((100 * row, 8), (3.5 * row / 0.7, 3), (1.2 * row / 0.7, 1)):
        monkeypatch.setattr(batches, "free_memory", lambda free=free: free)
        assert largest_batch(model, requests, 8) == expected
    monkeypatch.setattr(batches, "free_memory", lambda: row)
    with pytest.raises(UserError, match="an answer of 200 tokens with its prompt needs"):
        largest_batch(model, requests, 8)


def test_a_stop_string_that_names_a_control_token_stops_its_row(model, llama31):
    name = next(name for name, n in llama31.special_tokens.items() if n not in llama31.stop_ids)
    rows = [_Row(0, Request(ids(5, 0), 12, stop=stop), model, llama31) for stop in ((name,), ())]
    assert [row.add(llama31.special_tokens[name]) for row in rows] == [False, True]
