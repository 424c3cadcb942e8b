"""Sampling against a float64 NumPy reference: values, statistics, seeds and errors."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mlx_llama3.errors import UserError
from mlx_llama3.generation.sampling import (
    Counts,
    Sampler,
    Sampling,
    add_bias,
    draw,
    keep_min_p,
    keep_top_p,
    penalize,
    sample,
    top_k_ids,
    top_logprobs,
)

import mlx.core as mx


def random_logits(vocab: int = 500, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, vocab).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - np.max(logits))
    return weights / weights.sum()


def reference_kept(logits: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Ids that pass top_k, top_p and min_p, by a loop over the tokens from the best down."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if 0 < top_k < len(logits):
        order = order[:top_k]
    probs = softmax(logits[order])
    kept, mass = [], 0.0
    for rank, token in enumerate(order):
        if top_p < 1 and rank and mass >= top_p:
            break
        kept.append(token)
        mass += probs[rank]
    return np.array([i for i in kept if min_p == 0 or probs[order.index(i)] >= min_p * probs[0] * (1 - 1e-6)])


def kept(filtered: mx.array) -> np.ndarray:
    return np.flatnonzero(np.isfinite(np.array(filtered)))


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_best_set(p: float) -> None:
    logits = random_logits()
    got = keep_top_p(mx.array(logits), p)
    np.testing.assert_array_equal(kept(got), np.sort(reference_kept(logits, top_p=p)))
    np.testing.assert_array_equal(np.array(got)[kept(got)], logits[kept(got)])


@pytest.mark.parametrize("p", [1e-6, 0.05, 0.3, 1.0])
def test_min_p_keeps_what_is_near_the_best(p: float) -> None:
    logits = random_logits(seed=1)
    np.testing.assert_array_equal(kept(keep_min_p(mx.array(logits), p)), np.sort(reference_kept(logits, min_p=p)))


@pytest.mark.parametrize("k", [1, 2, 40, 499, 500, 10_000])
def test_top_k_keeps_exactly_k(k: int) -> None:
    logits = random_logits(seed=2)
    got = np.sort(np.array(top_k_ids(mx.array(logits), k)))
    np.testing.assert_array_equal(got, np.sort(reference_kept(logits, top_k=k)))


def test_filters_work_row_by_row() -> None:
    rows = np.stack([random_logits(seed=3), random_logits(seed=4)])
    for keep, p in ((keep_top_p, 0.7), (keep_min_p, 0.1)):
        both = np.array(keep(mx.array(rows), p))
        for row, filtered in zip(rows, both, strict=True):
            np.testing.assert_array_equal(filtered, np.array(keep(mx.array(row), p)))


def test_ties() -> None:
    level = mx.zeros(8)
    np.testing.assert_array_equal(kept(keep_top_p(level, 0.5)), [0, 1, 2, 3])
    np.testing.assert_array_equal(kept(keep_top_p(level, 0.0)), [0])
    assert len(kept(keep_min_p(level, 1.0))) == 8
    assert len(set(np.array(top_k_ids(level, 3)).tolist())) == 3
    assert sample(level, Sampling())[0].item() == 0


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12),
    top_k=st.integers(0, 20),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    temperature=st.floats(0, 5),
    seed=st.integers(0, 2**64 - 1),
)
def test_what_is_drawn_always_survives_the_reference(logits, top_k, top_p, min_p, temperature, seed) -> None:
    options = Sampling(temperature, top_k, top_p, min_p, seed=seed)
    token = Sampler(options, len(logits))(mx.array([logits]))[0].item()
    # Another token with an equal logit is fine too, and a float32 sum may reach the threshold one token later.
    allowed = reference_kept(np.array(logits), top_k, min(1.0, top_p + 1e-5), min_p * (1 - 1e-4))
    assert logits[token] in {logits[i] for i in allowed}


@pytest.mark.parametrize("seed", range(3))
def test_temperature_zero_is_argmax_whatever_the_filters(seed: int) -> None:
    logits = random_logits(seed=seed)
    for options in (
        Sampling(),
        Sampling(top_k=5, top_p=0.1, min_p=0.5),
        Sampling(3.0, top_k=1),
        Sampling(3.0, top_p=0),
    ):
        assert sample(mx.array(logits), options)[0].item() == logits.argmax()


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-4])
def test_a_tiny_temperature_is_the_argmax_too(temperature: float) -> None:
    for seed in range(8):
        token = Sampler(Sampling(temperature, seed=seed), 4)(mx.array([[2.9e38, -3e38, 5.0, 3e38]]))[0]
        assert token.item() == 3


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = np.array([2.0, -2.0, 1.0, -1.0, 0.0], dtype=np.float32)
    counts = Counts.of_prompt([0, 1, 1, 4], 5).add(mx.array([3]))
    got = penalize(mx.array(logits), counts, Sampling(repetition_penalty=1.5))
    np.testing.assert_allclose(np.array(got), [2 / 1.5, -3.0, 1.0, -1.5, 0.0], rtol=1e-6)


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    counts = Counts.of_prompt([0, 1], 4)
    for token in (1, 2, 2, 2):
        counts = counts.add(mx.array([token]))
    got = penalize(mx.zeros((1, 4)), counts, Sampling(presence_penalty=0.5, frequency_penalty=0.25))
    np.testing.assert_allclose(np.array(got), [[0.0, -0.75, -1.25, 0.0]], rtol=1e-6)
    assert np.array(counts.seen).tolist() == [True, True, True, False]


def test_bias_and_penalties_move_the_greedy_token() -> None:
    logits = mx.array([[1.0, 2.0, 3.0]])
    assert sample(logits, Sampling(logit_bias={0: 2.5}))[0].item() == 0
    assert sample(logits, Sampling(logit_bias={2: -math.inf}))[0].item() == 1
    sampler = Sampler(Sampling(presence_penalty=1.5), 3)
    assert [sampler(logits)[0].item() for _ in range(4)] == [2, 1, 2, 2]


def test_bias_comes_before_the_penalties() -> None:
    options = Sampling(logit_bias={0: 3.0}, repetition_penalty=2.0)
    # Token 0 becomes (1 + 3) / 2 = 2; the penalty first would give 1 / 2 + 3 = 3.5.
    counts = Counts.of_prompt([0], 2)
    assert sample(mx.array([1.0, 1.9]), options, counts=counts)[0].item() == 0
    assert sample(mx.array([1.0, 2.1]), options, counts=counts)[0].item() == 1


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="logit_bias names token 7; the vocabulary ends at 2"):
        add_bias(mx.zeros(3), {7: 1.0})


@pytest.mark.parametrize(
    "options",
    [
        Sampling(1.0),
        Sampling(0.7),
        Sampling(1.5, top_k=5),
        Sampling(0.8, top_p=0.8),
        Sampling(2.0, min_p=0.1),
        Sampling(1.3, top_k=6, top_p=0.9, min_p=0.05),
    ],
)
def test_draws_follow_the_distribution(options: Sampling) -> None:
    """Chi-square of 20,000 draws against filter-then-temper in float64, below the 1e-4 critical value."""
    logits = np.array([1.0, 0.3, -0.5, 2.0, 1.5, -1.0, 0.9, -2.5], dtype=np.float32)
    n = 20_000
    drawn = np.array(draw(mx.broadcast_to(mx.array(logits), (n, 8)), options, mx.random.key(11)))
    survivors = reference_kept(logits, options.top_k, options.top_p, options.min_p)
    expected = np.zeros(8)
    expected[survivors] = n * softmax(logits[survivors] / options.temperature)
    observed = np.bincount(drawn, minlength=8)
    assert observed[expected == 0].sum() == 0
    live = expected > 0
    chi_square = ((observed[live] - expected[live]) ** 2 / expected[live]).sum()
    critical = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74, 6: 27.86, 7: 29.88}
    assert chi_square < critical[live.sum() - 1]


def tokens_of(seed: int | None, n: int = 24) -> list[int]:
    sampler = Sampler(Sampling(1.0, seed=seed), 500)
    logits = mx.array(random_logits()[None])
    return [sampler(logits)[0].item() for _ in range(n)]


def test_a_seed_owns_its_key() -> None:
    mx.random.seed(1)
    first = tokens_of(7)
    untouched = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(2)
    assert tokens_of(7) == first
    mx.random.seed(1)
    assert mx.random.uniform(shape=(4,)).tolist() == untouched
    assert tokens_of(8) != first
    assert len(set(first)) > 1


def test_no_seed_is_fresh_each_time() -> None:
    mx.random.seed(3)
    first = tokens_of(None)
    mx.random.seed(3)
    assert tokens_of(None) != first


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits()
    options = Sampling(0.5, top_k=3, repetition_penalty=1.5, logit_bias={5: -50.0}, seed=1)
    token, logprobs = Sampler(options, 500, prompt=[1, 2])(mx.array(logits[None]))
    expected = np.log(softmax(logits))
    np.testing.assert_allclose(np.array(logprobs)[0], expected, atol=2e-5)
    ids, values = top_logprobs(logprobs, 4)
    best = np.argsort(-expected)[:4]
    assert ids.tolist() == [best.tolist()]
    np.testing.assert_allclose(np.array(values)[0], expected[best], atol=2e-5)
    assert token.shape == (1,)


def test_more_top_logprobs_than_tokens() -> None:
    ids, values = top_logprobs(mx.array([[-1.0, -3.0, -2.0]]), 9)
    assert ids.tolist() == [[0, 2, 1]]
    assert values.tolist() == [[-1.0, -2.0, -3.0]]


def test_nan_is_not_hidden() -> None:
    logits = random_logits()
    logits[100] = math.nan
    rows = mx.array(logits)
    assert 100 in np.array(top_k_ids(rows, 3))
    assert np.isnan(np.array(keep_top_p(rows, 0.5))[100])
    assert np.isnan(np.array(keep_min_p(rows, 0.5))[100])
    assert np.isnan(np.array(sample(rows, Sampling())[1])).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits(dtype: mx.Dtype) -> None:
    logits = mx.array(random_logits()).astype(dtype)
    options = Sampling(0.9, top_k=50, top_p=0.9, min_p=0.01, frequency_penalty=0.1, seed=2)
    token, logprobs = Sampler(options, 500)(logits[None])
    assert logprobs.dtype == mx.float32
    assert token.item() in np.argsort(-np.array(logits.astype(mx.float32)))[:50]


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e30, "top_k": 50},
        {"logit_bias": {7: 1e30, 8: -1e30, 9: -math.inf}},
        {"repetition_penalty": 1e30},
        {"repetition_penalty": 1e-30},
        {"presence_penalty": 1e30, "frequency_penalty": 1e30},
        {"presence_penalty": -1e30, "frequency_penalty": -1e30},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_extreme_options_make_no_nan(dtype: mx.Dtype, extreme: dict) -> None:
    """The token would be 0, or anything."""
    logits = random_logits()
    logits[0], logits[:8] = -1e4, logits[:8].round()
    logits[3] = 0  # 0 times infinity
    sampling = Sampling(**{"temperature": 1.0, "top_p": 0.9, "seed": 1} | extreme)
    sampler = Sampler(sampling, 500, prompt=range(8))
    drawn = [sampler(mx.array(logits[None]).astype(dtype))[0].item() for _ in range(20)]
    assert 0 not in drawn
    if "logit_bias" in extreme:
        assert drawn == [7] * 20


@pytest.mark.parametrize(
    ("option", "value", "range_text"),
    [
        ("temperature", -0.1, "from 0 (greedy) to 1e+30"),
        ("temperature", math.nan, "from 0 (greedy) to 1e+30"),
        ("temperature", math.inf, "from 0 (greedy) to 1e+30"),
        ("temperature", "warm", "from 0 (greedy) to 1e+30"),
        ("top_p", True, "from 0 to 1"),
        ("top_k", -1, "0 (off) or above"),
        ("top_k", 1.5, "whole number"),
        ("top_p", 1.01, "from 0 to 1"),
        ("top_p", -0.01, "from 0 to 1"),
        ("top_p", math.nan, "from 0 to 1"),
        ("min_p", 2, "from 0 (off) to 1"),
        ("min_p", -1, "from 0 (off) to 1"),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", math.nan, "above 0"),
        ("repetition_penalty", 1e300, "up to 1e+30"),
        ("temperature", 1e300, "to 1e+30"),
        ("presence_penalty", math.inf, "from -1e+30 to 1e+30"),
        ("frequency_penalty", math.nan, "from -1e+30 to 1e+30"),
        ("frequency_penalty", -1e31, "from -1e+30 to 1e+30"),
        ("seed", -1, "from 0 to 2**64 - 1"),
        ("seed", 2**64, "from 0 to 2**64 - 1"),
    ],
)
def test_values_out_of_range_are_refused_by_name(option: str, value: float, range_text: str) -> None:
    with pytest.raises(UserError) as caught:
        Sampling(**{option: value})
    message = str(caught.value)
    assert message.startswith(f"{option} is {value}; it must be ")
    assert range_text in message
    assert "\n" not in message


@pytest.mark.parametrize("bias", [{-1: 1.0}, {1: math.inf}, {1: 1e31}, {1: math.nan}, {"1": 1.0}])
def test_bad_logit_bias_is_refused(bias: dict) -> None:
    with pytest.raises(UserError, match="logit_bias"):
        Sampling(logit_bias=bias)
