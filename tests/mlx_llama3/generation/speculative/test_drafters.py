"""The two drafters: what they propose, and that a draft model's cache follows the stream."""

import pytest
from tiny_models import tiny_model
from watched_model import WatchedModel

from mlx_llama3.generation.sampling import Sampler, Sampling
from mlx_llama3.generation.speculative.drafters import ModelDrafter, NgramDrafter

import mlx.core as mx

VOCAB = 320
PROMPT = [3, 14, 159, 26, 5, 35, 89]


def looked_up(ids: list[int], count: int = 4) -> list[int]:
    drafter = NgramDrafter()
    drafter.begin(ids)
    return drafter.propose(count).tolist() if drafter.ready() else []


@pytest.mark.parametrize(
    ("ids", "guess"),
    [
        ([], []),
        ([7], []),
        ([7, 7], []),  # a match needs two tokens
        ([7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 3, 4, 5, 6, 9, 2, 3], [4, 5, 6, 9]),
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 9, 1, 2, 3], [5, 8, 9, 1]),  # 9 1 2 3 before 1 2 3
        ([0, 2, 3, 4, 8, 2, 3, 6, 7, 2, 3], [6, 7, 2, 3]),  # equally long: the later one
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),  # the continuation repeats
        ([1, 2, 3, 2, 1], []),
    ],
)
def test_prompt_lookup(ids, guess):
    assert looked_up(ids) == guess


def test_a_longer_match_wins_over_a_later_one():
    assert looked_up([5, 6, 7, 8, 1, 9, 6, 7, 2, 2, 0, 5, 6, 7], 1) == [8]


def test_lookup_follows_the_stream_and_forgets_the_last_answer():
    drafter = NgramDrafter()
    drafter.begin([1, 2, 3, 4])
    assert not drafter.ready()
    drafter.advance([1], 0)
    drafter.advance([2], 0)
    assert drafter.propose(2).tolist() == [3, 4]
    drafter.advance([3, 4, 1], 2)
    assert drafter.propose(3).tolist() == [2, 3, 4]
    drafter.begin([9, 1, 2])
    assert not drafter.ready()


def test_lookup_looks_at_a_bounded_number_of_places():
    ids = [5, 6, 7, 8, 1] + [6, 7, 2] * 100 + [5, 6, 7]
    assert looked_up(ids, 1) == [2]  # 5 6 7 8 lies behind a hundred later occurrences


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def greedy() -> Sampler:
    return Sampler(Sampling(), VOCAB)


def continued(model, ids: list[int], count: int) -> list[int]:
    ids = list(ids)
    for _ in range(count):
        ids.append(mx.argmax(model(mx.array([ids]))[0, -1]).item())
    return ids[-count:]


def test_a_model_guesses_its_own_continuation_whatever_was_right_before(model):
    drafter, ids = ModelDrafter(model, VOCAB), list(PROMPT)
    drafter.begin(ids)
    for count, accepted, last in [(4, 4, 7), (4, 2, 8), (3, 0, 9), (1, 1, 10), (5, 4, 11)]:
        guess = drafter.propose(count, greedy()).tolist()
        assert guess == continued(model, ids, count)
        came = [*guess[:accepted], last]
        drafter.advance(came, accepted)
        ids += came
        if count == 3:  # some undrafted tokens
            drafter.advance([12], 0)
            drafter.advance([13], 0)
            ids += [12, 13]
    assert drafter.propose(2, greedy()).tolist() == continued(model, ids, 2)


def test_the_next_answer_prefills_only_new_tokens():
    watched = WatchedModel()
    drafter = ModelDrafter(watched, VOCAB)
    drafter.begin(PROMPT)
    guess = drafter.propose(3, greedy()).tolist()
    drafter.advance([guess[0], 99], 1)  # the second drafted token was rejected, the third is not in the cache
    fed: list[int] = []
    residual = watched.residual
    watched.residual = lambda tokens, *rest: fed.extend(tokens[0].tolist()) or residual(tokens, *rest)
    drafter.begin([*PROMPT, guess[0], 50, 51])
    drafter.propose(1, greedy())
    assert fed == [50, 51]
    drafter.begin([*PROMPT[:3], 60])
    drafter.propose(1, greedy())
    assert fed == [50, 51, 60]


def test_an_answer_that_ended_in_the_middle_of_a_draft(model):
    drafter = ModelDrafter(model, VOCAB)
    drafter.begin(PROMPT)
    guess = drafter.propose(4, greedy()).tolist()  # `advance` is not called for this draft
    wrong = [*PROMPT, (guess[0] + 1) % VOCAB, 7]
    drafter.begin(wrong)
    assert drafter.propose(3, greedy()).tolist() == continued(model, wrong, 3)


def test_it_draws_with_the_noise_and_the_penalties_of_the_large_model(model):
    """With the same random keys and penalties, a model drafts exactly the tokens that it generates."""
    options = Sampling(1.3, top_k=40, repetition_penalty=1.4, frequency_penalty=0.5, seed=4)
    drafter = ModelDrafter(model, VOCAB)
    drafter.begin(PROMPT)
    guess = drafter.propose(6, Sampler(options, VOCAB, PROMPT)).tolist()
    sampler, ids = Sampler(options, VOCAB, PROMPT), list(PROMPT)
    for _ in range(6):
        ids.append(sampler(model(mx.array([ids]))[:, -1])[0].item())
    assert guess == ids[-6:]


@pytest.mark.parametrize("vocab", [300, 320, 352])
def test_vocabularies_may_differ_by_padding(model, vocab):
    drafter = ModelDrafter(model, vocab)
    drafter.begin(PROMPT)
    bias = dict.fromkeys((299, min(vocab, VOCAB) - 1), 50.0)
    sampler = Sampler(Sampling(1.0, seed=1, logit_bias=bias), vocab)
    assert set(drafter.propose(8, sampler).tolist()) <= set(bias)
    drafter.advance([vocab - 1], 0)  # an id past the draft model's vocabulary, where the large model's is longer
    assert max(drafter.propose(4, Sampler(Sampling(), vocab)).tolist()) < min(vocab, VOCAB)


def test_the_drafts_end_where_the_draft_models_context_ends():
    drafter = ModelDrafter(WatchedModel(max_seq_len=10), VOCAB)
    drafter.begin(PROMPT)
    assert drafter.propose(8, greedy()).size == 4  # seven ids and three drafted tokens are in the cache
    drafter.advance([1, 2, 3], 0)
    assert drafter.ready() and drafter.propose(8, greedy()).size == 1
    drafter.advance([4], 0)
    assert not drafter.ready()
    drafter.begin([1] * 11)
    assert not drafter.ready()


def test_a_prompt_is_read_in_chunks_and_can_be_stopped_between_them(model):
    chunks = []
    drafter = ModelDrafter(model, VOCAB)
    drafter.begin(PROMPT * 4, chunk=10, on_chunk=lambda: chunks.append(1))
    assert len(chunks) == 3  # 27 of 28 ids: the last one runs with the first drafted token

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drafter.begin([5, *PROMPT], chunk=3, on_chunk=stop)
    drafter.begin([5, *PROMPT], chunk=3)
    assert drafter.propose(3, greedy()).tolist() == continued(model, [5, *PROMPT], 3)
