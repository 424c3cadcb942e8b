"""Speculative decoding gives the same tokens, probabilities, norms, finish reasons and cache as plain decoding."""

from collections.abc import Callable

import numpy as np
import pytest
from table_model import TableModel
from tiny_models import random_weights, tiny_args, tiny_model, write_folder
from watched_model import WatchedModel

from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.conversation.conversation import Conversation
from mlx_llama3.errors import UserError
from mlx_llama3.generation.sampling import Sampler, Sampling
from mlx_llama3.generation.speculative.draft_switch import DraftSwitch
from mlx_llama3.generation.speculative.drafters import ModelDrafter, NgramDrafter
from mlx_llama3.generation.speculative.speculation import Speculation
from mlx_llama3.generation.stream import Step, generate
from mlx_llama3.model.cache.settings import CacheSettings

import mlx.core as mx

VOCAB = 320
PROMPT = [3, 14, 159, 26, 5, 35, 3, 14]
OPTIONS = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "filters": {"temperature": 1.2, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    "penalties": {"temperature": 1.1, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "greedy penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def near(model, tmp_path_factory):
    """A model that often predicts the same tokens as `model`: a copy with noise in its head."""
    copy = tiny_model(tmp_path_factory.mktemp("near"))
    weight = copy.output.weight
    copy.output.weight = weight + 0.03 * mx.random.normal(weight.shape, key=mx.random.key(9))
    return copy


@pytest.fixture
def drafts(model, near) -> dict[str, Callable[[], object]]:
    return {
        "ngram": NgramDrafter,
        "near": lambda: ModelDrafter(near, VOCAB),
        "same": lambda: ModelDrafter(model, VOCAB),
    }


def steps(model, tokenizer, draft: Speculation | None = None, ids=PROMPT, **options) -> list[Step]:
    ban = dict.fromkeys([t for t in tokenizer.stop_ids if t < VOCAB], float("-inf"))
    return list(generate(model, tokenizer, ids, draft=draft, logit_bias=ban, **options))


def tokens(*args, **options) -> list[int]:
    return [step.token for step in steps(*args, **options)]


@pytest.mark.parametrize("name", ["ngram", "near", "same"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_token_is_the_same_and_so_with_a_seed(model, tokenizer, drafts, name, options):
    expected = tokens(model, tokenizer, max_tokens=250, **options)
    draft = Speculation(drafts[name], tokens=4)
    assert tokens(model, tokenizer, draft, max_tokens=250, **options) == expected
    assert draft.accepted + draft.drafted_passes + draft.undrafted_tokens == 250
    if name == "same":
        assert draft.acceptance == 1 and draft.proposed > 190
    if name == "near":
        assert 0.1 < draft.acceptance < 1


@pytest.mark.parametrize("most", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("count", [1, 2, 3, 9, 40])
def test_any_length_of_draft_and_answer(model, tokenizer, drafts, most, count):
    expected = steps(model, tokenizer, max_tokens=count)
    for make in drafts.values():
        got = steps(model, tokenizer, Speculation(make, tokens=most), max_tokens=count)
        assert [(s.token, s.finish_reason) for s in got] == [(s.token, s.finish_reason) for s in expected]
        assert got[-1].finish_reason == "length"


def test_the_demo_model_says_the_same(demo_folder, tokenizer):
    """A text with repetitions, greedy and sampled, with the draft switch."""
    from mlx_llama3.checkpoint.loading import load_model

    demo = load_model(demo_folder)
    text = "The keeper climbed the stairs, cleaned the glass, lit the flame and wrote the time in a list."
    ids = tokenizer.encode_chat([{"role": "user", "content": f"Repeat this text word for word:\n\n{text}"}])
    for options in ({}, {"temperature": 0.7, "top_p": 0.95, "seed": 2}):
        expected = [step.token for step in generate(demo, tokenizer, ids, max_tokens=40, **options)]
        draft = Speculation(NgramDrafter, tokens=8, switch=DraftSwitch)
        assert [s.token for s in generate(demo, tokenizer, ids, max_tokens=40, draft=draft, **options)] == expected
        assert draft.accepted > 0 and draft.drafted_passes + draft.undrafted_tokens < 40


def critical(freedom: int, z: float = 3.72) -> float:
    """The chi-square value that is exceeded with probability 1e-4 (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("name", ["ngram", "near", "far"])
@pytest.mark.parametrize(
    "sampling", [Sampling(1.0, seed=1), Sampling(0.7, top_k=5, top_p=0.9, seed=2), Sampling(1.5, min_p=0.1, seed=3)]
)
def test_drawn_tokens_have_the_models_distribution(name, sampling):
    """3,000 tokens of a bigram table: chi-square over all transitions against float64, at the 1e-4 level."""
    vocab, count = 7, 3000
    table = np.random.default_rng(0).normal(0, 1.5, (vocab, vocab)).astype(np.float32)
    noise = np.random.default_rng(1).normal(0, 0.4 if name == "near" else 3.0, table.shape).astype(np.float32)
    model, small = TableModel(mx.array(table)), TableModel(mx.array(table + noise))
    draft = Speculation(NgramDrafter if name == "ngram" else lambda: ModelDrafter(small, vocab), tokens=3)
    cache = model.make_cache()
    draft.begin([2], cache, 1, chunk=8, on_chunk=lambda: None)
    logits = model(mx.array([[2]]), 0, cache)[:, -1]
    choices = draft.decode(model, logits, cache, Sampler(sampling, vocab), count=count)
    chain = [2, *(choice.token.item() for choice in choices)]

    observed = np.zeros((vocab, vocab))
    np.add.at(observed, (chain[:-1], chain[1:]), 1)
    chi_square, freedom = 0.0, 0
    for row, seen in zip(table, observed, strict=True):
        expected = seen.sum() * kept_probabilities(row.astype(np.float64), sampling)
        assert seen[expected == 0].sum() == 0
        live = expected > 4
        chi_square += ((seen[live] - expected[live]) ** 2 / expected[live]).sum()
        freedom += max(0, live.sum() - 1)
    assert freedom > 10 and chi_square < critical(freedom)
    assert 0.1 < draft.acceptance < 0.95  # both accepted and rejected tokens


def kept_probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The filtered distribution, computed from the best token down."""
    order = np.argsort(-logits)[: sampling.top_k or None]
    share = np.exp(logits[order] - logits[order[0]])
    before = np.cumsum(share / share.sum()) - share / share.sum()
    order = order[(before < sampling.top_p) & (share >= sampling.min_p)]
    weights = np.zeros(len(logits))
    weights[order] = np.exp((logits[order] - logits.max()) / sampling.temperature)
    return weights / weights.sum()


def test_a_deterministic_draft_is_accepted_with_the_models_probability():
    """The rejection rule of the papers also accepts min(1, p / 1) of the drafts."""
    table = mx.array(np.log([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]).astype(np.float32))

    after = []

    class Constant(NgramDrafter):
        def ready(self) -> bool:
            return True

        def propose(self, count, sampler=None):
            after.append(self._ids[-1])
            return mx.array([1], dtype=mx.uint32)

    model, draft = TableModel(table), Speculation(Constant, tokens=1)
    cache = model.make_cache()
    draft.begin([0], cache, 1, chunk=8, on_chunk=lambda: None)
    logits = model(mx.array([[0]]), 0, cache)[:, -1]
    choices = draft.decode(model, logits, cache, Sampler(Sampling(1.0, seed=5), 3), count=4000)
    assert sum(1 for _ in choices) == 4000
    share = np.mean([(0.3, 0.8, 0.3)[token] for token in after])
    # Within three standard errors.
    assert draft.proposed > 2000 and draft.acceptance == pytest.approx(share, abs=3 * (0.25 / draft.proposed) ** 0.5)


def test_logprobs_are_those_of_every_accepted_position(model, tokenizer, drafts):
    options = {"max_tokens": 60, "logprobs": 3, "temperature": 1.0, "seed": 1}
    expected = steps(model, tokenizer, **options)
    for make in drafts.values():
        for got, want in zip(steps(model, tokenizer, Speculation(make), **options), expected, strict=True):
            assert got.token == want.token
            assert got.logprob == pytest.approx(want.logprob, abs=1e-4)
            assert [token for token, _ in got.top_logprobs] == [token for token, _ in want.top_logprobs]
            assert [p for _, p in got.top_logprobs] == pytest.approx([p for _, p in want.top_logprobs], abs=1e-4)


def test_norms_are_those_of_every_accepted_position(model, tokenizer, drafts):
    expected = steps(model, tokenizer, max_tokens=60, trace=True)
    for make in drafts.values():
        for got, want in zip(
            steps(model, tokenizer, Speculation(make), max_tokens=60, trace=True), expected, strict=True
        ):
            np.testing.assert_allclose(got.norms, want.norms, rtol=1e-4)
            assert got.norms.shape == (5, 3, want.norms.shape[2])


@pytest.mark.parametrize("name", ["ngram", "near"])
@pytest.mark.parametrize("count", range(1, 30, 4))
def test_wherever_a_stream_is_closed_the_cache_holds_the_yielded_tokens(model, tokenizer, drafts, name, count):
    expected = tokens(model, tokenizer, max_tokens=40)
    cache, draft = model.make_cache(), Speculation(drafts[name], tokens=5)
    stream = generate(model, tokenizer, PROMPT, max_tokens=40, cache=cache, draft=draft)
    yielded = [next(stream).token for _ in range(count)]
    stream.close()
    cached = cache[0].offset - len(PROMPT)
    assert cached in (count - 1, count) and len({entry.offset for entry in cache}) == 1
    context = [*PROMPT, *yielded]
    for entry in cache:
        entry.trim(entry.offset - (len(context) - 1))
    rest = {"cache": cache, "history": context[:-1], "draft": draft, "max_tokens": 40 - count}
    assert yielded + tokens(model, tokenizer, ids=context[-1:], **rest) == expected


@pytest.mark.parametrize("kv_bits", [4, 8])
def test_a_quantized_cache_sees_the_same_with_drafts(tmp_path, tokenizer, kv_bits):
    """Blocks are quantized at the same positions; otherwise tokens would differ from some block on."""
    args = tiny_args(head_dim=64)
    model, settings = load_model(write_folder(tmp_path, args, random_weights(args))), CacheSettings(kv_bits=kv_bits)

    def answer(draft: Speculation | None, cache: list) -> list[int]:
        return tokens(model, tokenizer, draft, max_tokens=400, cache=cache)

    cache = model.make_cache(settings)
    expected = answer(None, cache)
    for drafted in (1, 4, 11):
        draft, drafts_cache = (
            Speculation(lambda: ModelDrafter(model, VOCAB), tokens=drafted),
            model.make_cache(settings),
        )
        assert answer(draft, drafts_cache) == expected
        assert draft.accepted > 150
        for one, other in zip(cache, drafts_cache, strict=True):
            other_kv = [tensor[:, :, :400] for tensor in other.fetch()]
            for a, b in zip(one.fetch(), other_kv, strict=True):
                # A group may differ if its scale lies between two float16 numbers, where rounding decides. A block that
                # only one cache had quantized would be a sixth of all values.
                assert (np.abs(np.array(a[:, :, :400]) - np.array(b)) > 1e-4).mean() < 0.05


@pytest.mark.parametrize("name", ["ngram", "near"])
def test_a_cache_with_a_window_is_trimmed_too(model, tokenizer, drafts, name):
    """The answer is longer than the window, so rejected drafts have overwritten other slots."""
    settings, options = CacheSettings(max_kv_size=40), {"max_tokens": 400}
    expected = tokens(model, tokenizer, cache=model.make_cache(settings), **options)
    draft = Speculation(drafts[name], tokens=5)
    assert tokens(model, tokenizer, draft, cache=model.make_cache(settings), **options) == expected
    assert draft.drafted_passes > 50 and 0 < draft.acceptance < 1


@pytest.fixture
def talker(tokenizer):
    return WatchedModel(vocab_size=tokenizer.vocab_size, max_seq_len=2048)


def say(talker, tokenizer, text: str, *, draft: Speculation, ids: list[int] = PROMPT, **options) -> list[Step]:
    talker.replies = [[*tokenizer.encode(text), min(tokenizer.stop_ids)]]
    return list(generate(talker, tokenizer, ids, draft=draft, **options))


WORDS = "one two three four five six seven. "


@pytest.mark.parametrize("cut", [WORDS, WORDS + "one two", WORDS * 2 + "one"])
def test_a_stop_id_inside_a_draft_ends_the_answer(talker, tokenizer, cut):
    draft = Speculation(NgramDrafter, tokens=8)
    got = say(talker, tokenizer, cut, draft=draft, ids=tokenizer.encode(WORDS * 2), max_tokens=99)
    assert "".join(step.text for step in got) == cut
    assert (got[-1].finish_reason, got[-1].token) == ("stop", min(tokenizer.stop_ids))
    assert draft.accepted > 0


def test_a_stop_string_inside_a_draft_ends_the_answer(talker, tokenizer):
    draft = Speculation(NgramDrafter, tokens=8)
    got = say(talker, tokenizer, WORDS * 3, draft=draft, ids=tokenizer.encode(WORDS), stop=["six"])
    assert "".join(step.text for step in got) == "one two three four five "
    assert got[-1].finish_reason == "stop" and draft.accepted > 0


def test_max_tokens_and_the_context_end_inside_a_draft(talker, tokenizer):
    ids = tokenizer.encode(WORDS * 2)
    for count in range(1, 20):
        draft = Speculation(NgramDrafter, tokens=8)
        got = say(talker, tokenizer, WORDS * 4, draft=draft, ids=ids, max_tokens=count)
        assert (len(got), got[-1].finish_reason) == (count, "length")
    small = WatchedModel(vocab_size=tokenizer.vocab_size, max_seq_len=len(ids) + 13)
    got = say(small, tokenizer, WORDS * 4, draft=Speculation(NgramDrafter, tokens=8), ids=ids)
    assert (len(got), got[-1].finish_reason) == (13, "length")


@pytest.mark.parametrize("name", ["ngram", "near"])
def test_nan_is_an_error(tmp_path, tokenizer, drafts, name):
    """The damaged embedding is that of a late token, so the NaN comes from a pass over a draft."""
    spoiled = tiny_model(tmp_path)
    last = tokens(spoiled, tokenizer, max_tokens=60)[-1]
    weight = spoiled.tok_embeddings.weight
    spoiled.tok_embeddings.weight = mx.where(mx.arange(VOCAB)[:, None] == last, float("nan"), weight)
    with pytest.raises(UserError, match="the model gives NaN"):
        steps(spoiled, tokenizer, Speculation(drafts[name]), max_tokens=90)


def test_without_a_draft_the_next_pass_is_queued_before_a_token_is_read(talker, tokenizer):
    cache = talker.make_cache()
    talker.replies = [tokenizer.encode("Nothing here was said before, ever.")]
    draft = Speculation(NgramDrafter)
    stream = generate(talker, tokenizer, PROMPT[:6], max_tokens=4, cache=cache, draft=draft)
    assert [cache[0].offset for _ in stream] == [7, 8, 9, 9]
    assert draft.proposed == 0


def test_drafting_that_does_not_pay_is_switched_off_and_the_tokens_stay(model, tokenizer, drafts):
    """The clock makes a drafted pass take as long as ten undrafted ones."""
    now = [0.0]
    speculation: list[Speculation] = []

    def clock() -> float:
        now[0] += 10.0 if speculation[0].proposed > clock.proposed else 1.0
        clock.proposed = speculation[0].proposed
        return now[0]

    clock.proposed = 0
    speculation.append(Speculation(drafts["near"], tokens=4, switch=lambda: DraftSwitch(clock)))
    options = {"max_tokens": 200, "temperature": 0.8, "seed": 1}
    assert tokens(model, tokenizer, speculation[0], **options) == tokens(model, tokenizer, **options)
    (draft,) = speculation
    assert draft.undrafted_tokens >= DraftSwitch.FIRST + 32 + 64
    assert draft.drafted_passes >= 2 * DraftSwitch.WINDOW


def test_a_conversation_keeps_the_draft_model_in_step(tokenizer):
    large, small = (WatchedModel(vocab_size=tokenizer.vocab_size, max_seq_len=2048) for _ in range(2))
    weight = small.output.weight
    small.output.weight = weight + 0.02 * mx.random.normal(weight.shape, key=mx.random.key(1))
    draft = Speculation(lambda: ModelDrafter(small, tokenizer.vocab_size), tokens=3)
    settings = {"max_tokens": 12, "temperature": 0.5, "seed": 1}
    drafted = Conversation(large, tokenizer, settings=settings, draft=draft)
    plain = Conversation(large, tokenizer, settings=settings)
    for turn in (
        lambda talk: list(talk.send("Hello there")),
        lambda talk: next(talk.send("How are you?")),  # left in the middle
        lambda talk: list(talk.retry()),
        lambda talk: talk.undo(),
        lambda talk: list(talk.send("And another thing", seed=2)),
    ):
        turn(drafted), turn(plain)
        drafted._settle(), plain._settle()
        assert drafted.ids == plain.ids
    assert draft.accepted > 0
    assert max(small.prompts[-1:]) <= drafted.fed  # the common prefix was not prefilled again


def test_a_copy_drafts_for_another_stream(model, tokenizer, drafts):
    draft = Speculation(drafts["near"], tokens=3)
    copy = draft.copy()
    streams = [
        generate(model, tokenizer, ids, max_tokens=20, draft=speculation)
        for ids, speculation in ((PROMPT, draft), (PROMPT[::-1], copy))
    ]
    mixed = [[step.token for step in pair] for pair in zip(*streams, strict=True)]
    for place, ids in enumerate((PROMPT, PROMPT[::-1])):
        assert [pair[place] for pair in mixed] == [s.token for s in generate(model, tokenizer, ids, max_tokens=20)]
    assert copy.tokens == 3


def test_bad_input(model, tokenizer):
    for number in (0, 33, 2.5):
        with pytest.raises(UserError, match="tokens is .* from 1 to 32"):
            Speculation(NgramDrafter, tokens=number)
    cache = model.make_cache()
    list(generate(model, tokenizer, PROMPT, max_tokens=1, cache=cache))
    with pytest.raises(UserError, match="a draft needs all ids before it: the cache holds 8, history has 0"):
        next(generate(model, tokenizer, [5], cache=cache, draft=Speculation(NgramDrafter)))


def test_a_cache_that_cannot_be_trimmed_is_refused_at_the_start():
    class Sealed:
        offset = 0

    with pytest.raises(UserError, match="a draft needs a cache that can be trimmed, which Sealed cannot be"):
        Speculation(NgramDrafter).begin(PROMPT, [Sealed()], len(PROMPT), chunk=8, on_chunk=lambda: None)
