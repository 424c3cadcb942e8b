"""The token stream against a naive loop of full passes, and its text against decoding all ids at once."""

import numpy as np
import pytest
from tiny_models import tiny_model
from watched_model import WatchedModel

from mlx_llama3.errors import UserError
from mlx_llama3.generation.stream import generate

import mlx.core as mx

PROMPT = [3, 14, 159, 26, 5, 35]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def talker(tokenizer):
    """A model that generates the ids in `replies`."""
    return WatchedModel(vocab_size=tokenizer.vocab_size)


def tokens(model, tokenizer, ids=PROMPT, **options) -> list[int]:
    return [step.token for step in generate(model, tokenizer, ids, **options)]


def naive(model, ids: list[int], count: int) -> list[int]:
    """Greedy decoding with a full pass, without cache, for every token."""
    ids = list(ids)
    for _ in range(count):
        ids.append(mx.argmax(model(mx.array([ids]))[0, -1]).item())
    return ids[-count:]


def test_greedy_equals_full_passes(model, tokenizer):
    ban = dict.fromkeys([t for t in tokenizer.stop_ids if t < model.args.vocab_size], float("-inf"))
    assert tokens(model, tokenizer, max_tokens=20, logit_bias=ban) == naive(model, PROMPT, 20)


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 6, 100])
def test_chunks_change_nothing(model, tokenizer, chunk):
    progress = []
    options = {"max_tokens": 6, "prefill_chunk": chunk}
    assert tokens(model, tokenizer, on_prefill=lambda *at: progress.append(at), **options) == naive(model, PROMPT, 6)
    assert progress == [(min(done, 6), 6) for done in range(chunk, 6 + chunk, chunk)]


def test_the_head_sees_only_the_last_position_of_a_prompt(talker, tokenizer):
    shapes = []
    head = talker.head
    talker.head = lambda x: shapes.append(x.shape) or head(x)
    tokens(talker, tokenizer, max_tokens=3, prefill_chunk=4)
    assert [np.prod(shape[:-1]) for shape in shapes] == [1, 1, 1]


def test_each_chunk_is_computed_before_the_next_is_queued(model, tokenizer):
    """This bounds the memory of a long prompt, gives real progress, and lets Ctrl-C interrupt."""
    args, prompt = model.args, [7] * 400
    there, before = [], mx.get_active_memory()
    list(
        generate(
            model,
            tokenizer,
            prompt,
            max_tokens=1,
            prefill_chunk=100,
            on_prefill=lambda *_: there.append(mx.get_active_memory() - before),
        )
    )
    keys_and_values = 2 * args.n_layers * args.n_kv_heads * args.head_dim * 256 * 4  # buffers of 256 positions
    assert keys_and_values <= there[0] < 2 * keys_and_values  # nothing else of the pass remains
    assert 2 * keys_and_values <= there[2] < 3 * keys_and_values


def test_no_step_waits_for_its_result_before_the_next_is_queued(talker, tokenizer, monkeypatch):
    def wait(*_):
        raise AssertionError("decoding must not wait")

    monkeypatch.setattr(mx, "eval", wait)
    assert len(tokens(talker, tokenizer, max_tokens=3, logprobs=2, temperature=1.0)) == 3


def test_a_token_is_written_into_the_cache_in_place(tokenizer):
    talker = WatchedModel(vocab_size=tokenizer.vocab_size, n_kv_heads=4, head_dim=64, max_seq_len=2048)
    cache = talker.make_cache()
    steps = generate(talker, tokenizer, [7] * 1600, max_tokens=20, cache=cache)
    next(steps)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert len(list(steps)) == 19
    one_copy = cache[0].state[0].nbytes
    assert one_copy > 3_500_000  # far more than a step takes otherwise
    assert mx.get_peak_memory() - before < one_copy


def test_the_next_step_is_queued_before_this_one_is_read(talker, tokenizer):
    cache = talker.make_cache()
    steps = generate(talker, tokenizer, PROMPT, max_tokens=3, cache=cache)
    offsets = [cache[0].offset for _ in steps]
    assert offsets == [7, 8, 8]  # one position ahead until the last token


def test_goes_on_from_a_cache(model, tokenizer):
    whole = tokens(model, tokenizer, max_tokens=12)
    cache = model.make_cache()
    first = tokens(model, tokenizer, max_tokens=5, cache=cache)
    assert cache[0].offset == len(PROMPT) + 4  # the last token is not in the cache
    assert first + tokens(model, tokenizer, first[-1:], max_tokens=7, cache=cache) == whole


def test_closing_early_leaves_a_cache_that_can_be_trimmed(model, tokenizer):
    cache = model.make_cache()
    steps = generate(model, tokenizer, PROMPT, max_tokens=12, cache=cache)
    first = next(steps).token
    steps.close()
    for entry in cache:
        entry.trim(entry.offset - len(PROMPT))
    assert tokens(model, tokenizer, [first], max_tokens=3, cache=cache) == naive(model, [*PROMPT, first], 3)


def test_finish_reasons(talker, tokenizer):
    stop_id = tokenizer.special_tokens["<|im_end|>"]
    talker.replies = [[*tokenizer.encode("Hello there"), stop_id]]
    steps = list(generate(talker, tokenizer, PROMPT, max_tokens=9))
    assert [step.finish_reason for step in steps] == [None, None, "stop"]
    assert (steps[-1].token, steps[-1].text) == (stop_id, "")
    talker.replies = [tokenizer.encode("Hello there, you")]
    assert [s.finish_reason for s in generate(talker, tokenizer, PROMPT, max_tokens=2)] == [None, "length"]


def test_the_context_ends_the_answer(tokenizer):
    talker = WatchedModel(vocab_size=tokenizer.vocab_size, max_seq_len=10)
    steps = list(generate(talker, tokenizer, PROMPT, max_tokens=50))
    assert (len(steps), steps[-1].finish_reason) == (4, "length")


def test_a_stop_string_that_names_a_control_token_stops_there(talker, tokenizer):
    name = "<|im_start|>"
    assert tokenizer.special_tokens[name] not in tokenizer.stop_ids
    said = [*tokenizer.encode("Hello there"), tokenizer.special_tokens[name], *tokenizer.encode(" and on")]
    for stop, count in (((name,), 3), (name, 3), (("and", name), 3), (("never",), len(said)), ((), len(said))):
        talker.replies = [said]
        steps = list(generate(talker, tokenizer, PROMPT, max_tokens=len(said), stop=stop))
        assert (len(steps), steps[-1].finish_reason) == (count, "stop" if count == 3 else "length")
    talker.replies = [tokenizer.encode(f"Plain {name} text")]  # the name as plain text is a stop string as any other
    steps = list(generate(talker, tokenizer, PROMPT, max_tokens=20, stop=[name]))
    assert ("".join(step.text for step in steps), steps[-1].finish_reason) == ("Plain ", "stop")
    with pytest.raises(UserError, match=r"has text beside the control token <\|im_start\|>; give <\|im_start\|> alone"):
        list(generate(talker, tokenizer, PROMPT, stop=["\n" + name]))


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is Paris.",
        "🙂👩‍👩‍👧‍👦🇫🇷👍🏽 emoji",
        "日本語と中文, 한국어, ไทย, العربية",
        "e\u0301 n\u0303 a\u0308 combining; \u0915\u094d\u0937",
        "def f(x):\n        return   x  # spaces\n\n\n",
        "\u20ac\U0001f600",
    ],
)
@pytest.mark.parametrize("stop", [(), ("\x00", "never there", "🙂🙂")])
def test_streamed_text_equals_the_decode_of_all_ids(talker, tokenizer, text, stop):
    ids = tokenizer.encode(text)
    for end in range(1, len(ids) + 1):  # every length, also in the middle of characters
        talker.replies = [ids[:end]]
        steps = list(generate(talker, tokenizer, PROMPT, max_tokens=end, stop=stop))
        assert [s.token for s in steps] == ids[:end]
        assert "".join(s.text for s in steps) == tokenizer.decode(ids[:end])
        assert all("\ufffd" not in s.text for s in steps[:-1])
        talker.replies = [[*ids[:end], min(tokenizer.stop_ids)]]
        steps = list(generate(talker, tokenizer, PROMPT, max_tokens=end + 9, stop=stop))
        assert "".join(s.text for s in steps) == tokenizer.decode(ids[:end])
        assert steps[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        ("One, two, three, four", ["three"], "One, two, "),
        ("One, two, three, four", [", thr", "four"], "One, two"),
        ("a\n\nUser: b", ["\n\nUser:"], "a"),
        ("smile 🙂 and go", ["🙂"], "smile "),
        ("no end, but its begin", ["beginning"], "no end, but its begin"),
    ],
)
def test_stop_strings(talker, tokenizer, said, stop, shown):
    ids = tokenizer.encode(said)
    talker.replies = [ids]
    steps = list(generate(talker, tokenizer, PROMPT, max_tokens=len(ids), stop=stop))
    assert "".join(step.text for step in steps) == shown
    reached = any(s in said for s in stop)
    assert steps[-1].finish_reason == ("stop" if reached else "length")
    assert len(steps) <= len(ids)


def test_logprobs(model, tokenizer):
    ids = list(PROMPT)
    for step in generate(model, tokenizer, PROMPT, max_tokens=4, logprobs=3, temperature=0.7, top_k=5, seed=1):
        logits = np.array(model(mx.array([ids]))[0, -1], dtype=np.float64)
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert step.logprob == pytest.approx(expected[step.token], abs=1e-4)
        assert [token for token, _ in step.top_logprobs] == np.argsort(-expected)[:3].tolist()
        assert [p for _, p in step.top_logprobs] == pytest.approx(np.sort(expected)[::-1][:3], abs=1e-4)
        ids.append(step.token)
    (plain,) = generate(model, tokenizer, PROMPT, max_tokens=1)
    assert (plain.logprob, plain.top_logprobs) == (None, None)
    (chosen,) = generate(model, tokenizer, PROMPT, max_tokens=1, logprobs=0)
    assert chosen.logprob < 0 and chosen.top_logprobs is None


def test_a_seed_owns_its_key(model, tokenizer):
    options = {"max_tokens": 12, "temperature": 1.5}
    mx.random.seed(1)
    first = tokens(model, tokenizer, seed=7, **options)
    mx.random.seed(2)
    assert tokens(model, tokenizer, seed=7, **options) == first
    assert tokens(model, tokenizer, seed=8, **options) != first
    assert tokens(model, tokenizer, **options) != tokens(model, tokenizer, **options)


def test_options_reach_the_sampler(model, tokenizer):
    best = tokens(model, tokenizer, max_tokens=1)[0]
    assert tokens(model, tokenizer, max_tokens=8, logit_bias={best: float("-inf")}).count(best) == 0
    talked = tokens(model, tokenizer, max_tokens=12, presence_penalty=1e6)
    assert len(set(talked)) == len(talked)
    # The repetition penalty applies to the ids in the cache too.
    cache = model.make_cache()
    model(mx.array([PROMPT[:-1]]), 0, cache)
    # A penalty below 1 makes the prompt's tokens repeat.
    rest = {"max_tokens": 4, "repetition_penalty": 1e-3}
    expected = tokens(model, tokenizer, **rest)
    assert set(expected) <= set(PROMPT)
    assert expected[0] != PROMPT[-1]
    assert tokens(model, tokenizer, PROMPT[-1:], cache=cache, history=PROMPT[:-1], **rest) == expected


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_one_nan_among_the_logits_is_noticed_though_another_token_is_drawn(tokenizer, talker, filters):
    weight = talker.output.weight
    weight[777] = float("nan")
    talker.output.weight = weight
    with pytest.raises(UserError, match="NaN, first in output"):
        tokens(talker, tokenizer, temperature=1.0, seed=1, **filters)


@pytest.mark.parametrize(("layer", "branch"), [(1, "attention"), (2, "feed_forward")])
def test_nan_names_the_layer_and_is_no_token(tmp_path, tokenizer, layer, branch):
    model = tiny_model(tmp_path)
    module = getattr(model.layers[layer], branch)
    matrix = module.wo if branch == "attention" else module.w2
    matrix.weight = mx.full(matrix.weight.shape, 3e38)  # overflows in the product
    with pytest.raises(UserError, match=f"NaN, first in layers.{layer}.{branch}"):
        tokens(model, tokenizer, max_tokens=3)


def test_a_nan_that_comes_from_the_cache_is_found_there(tmp_path, tokenizer):
    model = tiny_model(tmp_path)
    weight = model.tok_embeddings.weight
    weight[9] = float("inf")
    model.tok_embeddings.weight = weight
    cache = model.make_cache()
    model(mx.array([[9]]), 0, cache)
    with pytest.raises(UserError, match="NaN, first in tok_embeddings"):
        tokens(model, tokenizer, [3], cache=cache, history=[9])


@pytest.mark.parametrize(
    ("ids", "options", "said"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 320], {}, "token id 320 is not in the vocabulary of 0 to 319"),
        ([-1], {}, "token id -1"),
        (PROMPT, {"max_tokens": 0}, "max_tokens is 0"),
        (PROMPT, {"prefill_chunk": 0}, "prefill_chunk is 0"),
        (PROMPT, {"temperature": -0.1}, "temperature is -0.1"),
        (PROMPT, {"stop": [""]}, "stop string is empty"),
        (PROMPT, {"logit_bias": {320: 1.0}}, "token 320"),
        ([1] * 512, {}, "512 tokens leave no room in the model's context of 512"),
    ],
)
def test_bad_input(model, tokenizer, ids, options, said):
    with pytest.raises(UserError, match=said):
        next(generate(model, tokenizer, ids, **options))


def test_unknown_option(model, tokenizer):
    with pytest.raises(TypeError, match="top_kk"):
        next(generate(model, tokenizer, PROMPT, top_kk=3))
