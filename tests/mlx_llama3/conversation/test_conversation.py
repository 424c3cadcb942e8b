"""Conversations with a tiny random model and the demo model's tokenizer: prefill, replies, dropped turns, errors."""

import json
import re

import numpy as np
import pytest
from watched_model import WatchedModel

from mlx_llama3.conversation.conversation import ContextFull, Conversation
from mlx_llama3.conversation.system_prefix import keep_system_prefix, system_prefix
from mlx_llama3.errors import UserError
from mlx_llama3.model.cache.prefix import PrefixCache
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.tokenizer.tokenizer import Tokenizer

import mlx.core as mx


@pytest.fixture(scope="module")
def stop_id(tokenizer) -> int:
    return tokenizer.special_tokens["<|im_end|>"]


@pytest.fixture
def model(tokenizer) -> WatchedModel:
    return WatchedModel(vocab_size=tokenizer.vocab_size)


@pytest.fixture
def chat(model, tokenizer) -> Conversation:
    return Conversation(model, tokenizer, system="Be brief.")


def say(conversation: Conversation, text: str, reply: str, ends: bool = True, **options) -> list:
    """One turn in which the model generates `reply`, and the end-of-turn token if `ends`."""
    ids = conversation.tokenizer.encode(reply)
    conversation.model.replies = [ids + [conversation.tokenizer.special_tokens["<|im_end|>"]] if ends else ids]
    return list(conversation.send(text, **options))


def expected_ids(conversation: Conversation) -> list[int]:
    """The chat template's ids of the conversation, up to the end of the last reply's content."""
    ids = conversation.tokenizer.encode_chat(conversation.messages, add_generation_prompt=False)
    end = conversation.tokenizer.encode("\n", allow_special=True)
    assert ids[-len(end) - 1] == conversation.tokenizer.special_tokens["<|im_end|>"]
    return ids[: -len(end) - 1]


def test_a_turn_costs_only_its_new_tokens(chat, model, tokenizer, stop_id) -> None:
    say(chat, "What is the capital of France?", "The capital of France is Paris.")
    first = tokenizer.encode_chat(chat.messages[:2])
    assert model.prompts == [len(first)]
    steps = say(chat, "And of Italy?", "Rome.")
    assert steps[-1].token == stop_id and steps[-1].finish_reason == "stop"
    say(chat, "Thanks!", "You are welcome.")
    after = [len(tokenizer.encode_after_reply(chat.messages[: 2 * n])) for n in (2, 3)]
    # The end-of-turn token is not in the cache, unless the next step was queued already.
    assert [n - m for n, m in zip(after, model.prompts[1:], strict=True)] in ([0, 0], [1, 1])
    assert max(after) < len(first)
    assert chat.fed == model.prompts[-1]
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "And of Italy?"},
        {"role": "assistant", "content": "Rome."},
        {"role": "user", "content": "Thanks!"},
        {"role": "assistant", "content": "You are welcome."},
    ]
    assert chat.ids == expected_ids(chat)
    assert chat.used == len(chat.ids)


def assert_next_is_that_of_a_fresh_pass(chat: Conversation, text: str) -> None:
    (step,) = chat.send(text, max_tokens=1, logprobs=5)
    logits = chat.model.plain_logits(chat.ids[:-1])
    fresh = np.array(logits - mx.logsumexp(logits))
    best = np.argsort(-fresh)[:5]
    assert [token for token, _ in step.top_logprobs] == best.tolist()
    np.testing.assert_allclose([value for _, value in step.top_logprobs], fresh[best], atol=1e-4)


def test_logits_after_many_turns_are_those_of_a_fresh_pass(chat) -> None:
    say(chat, "One?", "The first.")
    say(chat, "Two?", "The second", ends=False, max_tokens=2)
    next(chat.send("Three?"))
    list(chat.retry(max_tokens=7))
    chat.undo()
    say(chat, "Four?", "It ends HERE and goes on", ends=False, max_tokens=20)
    chat.system = "Be very brief."
    assert_next_is_that_of_a_fresh_pass(chat, "Five?")
    chat.reset()
    assert_next_is_that_of_a_fresh_pass(chat, "Six?")


def test_after_a_stop_by_length_the_last_token_is_fed_and_the_turn_is_ended(chat, model, tokenizer) -> None:
    steps = say(chat, "Count!", "one two three four five", ends=False, max_tokens=3)
    assert steps[-1].finish_reason == "length"
    assert chat.messages[-1]["content"] == "one two three"
    say(chat, "Go on.", "four")
    assert model.prompts[1] == 1 + len(tokenizer.encode_after_reply(chat.messages[:4]))
    assert chat.ids == expected_ids(chat)


def test_an_answer_that_is_stopped_half_way_is_kept(chat, model, tokenizer) -> None:
    model.replies = [tokenizer.encode("one two three four five")]
    steps = chat.send("Count!")
    assert "".join(next(steps).text for _ in range(3)) == "one two three"
    steps.close()
    assert chat.messages[-1]["content"] == "one two three"
    say(chat, "Go on.", "four")
    assert model.prompts[1] <= 1 + len(tokenizer.encode_after_reply(chat.messages[:4]))
    assert chat.ids == expected_ids(chat)


def test_an_answer_left_half_read_is_settled_by_whatever_comes_next(chat, model, tokenizer) -> None:
    model.replies = [tokenizer.encode("one two three four five")]
    left = chat.send("Count!")
    next(left)
    say(chat, "Again!", "six")
    assert [m["content"] for m in chat.messages[1:]] == ["Count!", "one", "Again!", "six"]
    assert list(left) == []
    left = chat.send("More!", max_tokens=9)
    next(left)
    assert chat.undo() == "More!"
    assert len(chat.messages) == 5


def test_bytes_of_an_incomplete_character_are_not_part_of_the_reply(chat, model, tokenizer) -> None:
    hi, emoji = tokenizer.encode("Hi "), tokenizer.encode("🙂")
    assert len(emoji) > 1
    model.replies = [hi + emoji]
    steps = chat.send("Hello")
    shown = "".join(next(steps).text for _ in [*hi, emoji[0]])
    steps.close()
    assert chat.messages[-1]["content"] == shown
    assert "\ufffd" not in shown
    assert tokenizer.decode(chat.ids).endswith(shown)
    model.replies = [emoji]
    steps = chat.send("Smile!")
    assert next(steps).text == ""
    steps.close()
    assert len(chat.messages) == 3  # no text, so the turn is discarded
    assert_next_is_that_of_a_fresh_pass(chat, "Go on")


@pytest.mark.parametrize(("stop", "kept"), [(" END", "It is done"), ("ND of", "It is done E"), ("It", "")])
def test_a_stop_string_is_not_part_of_the_reply(chat, tokenizer, stop, kept) -> None:
    say(chat, "Well?", "It is done END of it", ends=False, max_tokens=30)
    steps = say(chat, "Well?", "It is done END of it", ends=False, max_tokens=30, stop=[stop])
    assert steps[-1].finish_reason == "stop"
    assert "".join(step.text for step in steps) == kept
    if not kept:
        assert len(chat.messages) == 3
        return
    assert chat.messages[-1]["content"] == kept
    assert tokenizer.decode(chat.ids).endswith("assistant\n" + kept)
    assert_next_is_that_of_a_fresh_pass(chat, "Go on")


def test_retry_feeds_one_token_and_replaces_the_reply(chat, model) -> None:
    say(chat, "One?", "first")
    say(chat, "Two?", "second")
    model.replies = [[*chat.tokenizer.encode("another"), 2]]
    list(chat.retry())
    assert model.prompts[-1] == chat.fed == 1
    assert [m["content"] for m in chat.messages[1:]] == ["One?", "first", "Two?", "another"]
    assert chat.ids == expected_ids(chat)


def test_a_retry_without_text_keeps_the_old_reply(chat, model, stop_id) -> None:
    say(chat, "One?", "first")
    model.replies = [[stop_id]]
    list(chat.retry())
    assert chat.messages[-1]["content"] == "first"


def test_undo_and_reset(chat, model) -> None:
    say(chat, "One?", "first")
    ids = chat.ids
    say(chat, "Two?", "second")
    assert chat.undo() == "Two?"
    assert chat.ids == ids
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert chat.used == 0
    say(chat, "Ten?", "tenth")
    # The system prompt and the header of the first message are still in the cache.
    assert model.prompts[-1] < len(chat.tokenizer.encode_chat(chat.messages[:2])) - 5
    for act in (chat.undo, chat.undo):
        if chat.used:
            act()
    with pytest.raises(UserError, match="no message to take back"):
        chat.undo()
    with pytest.raises(UserError, match="no message to answer again"):
        chat.retry()


def test_the_system_prompt_can_be_changed(chat, tokenizer) -> None:
    say(chat, "One?", "first")
    say(chat, "Two?", "second")
    chat.system = "Answer at length."
    assert chat.messages[0] == {"role": "system", "content": "Answer at length."}
    assert chat.ids == expected_ids(chat)
    chat.system = None
    assert chat.messages[0]["role"] == "user"
    assert chat.ids == expected_ids(chat)


def test_a_system_prompt_that_is_refused_changes_nothing(model, tokenizer) -> None:
    template = tokenizer.chat_templates["default"]
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + template
    chat = Conversation(model, Tokenizer(tokenizer.vocabulary, templates={"default": refusing}))
    for _ in range(2):  # before the first message, and after it
        before = chat.messages, chat.ids
        with pytest.raises(UserError, match="no system role"):
            chat.system = "Be brief."
        assert chat.system is None
        assert (chat.messages, chat.ids) == before
        say(chat, "One?", "first")


def test_a_system_prompt_that_is_longer_than_the_window_changes_nothing(model, tokenizer) -> None:
    chat = Conversation(model, tokenizer, system="Be brief.", cache_settings=CacheSettings(max_kv_size=64))
    say(chat, "One?", "first")
    before = chat.system, chat.messages, chat.ids
    with pytest.raises(UserError, match="the system prompt takes"):
        chat.system = "Be brief. " * 40
    assert (chat.system, chat.messages, chat.ids) == before


def test_the_window_of_an_adopted_cache_keeps_no_more_than_the_new_system_prompt(model, tokenizer) -> None:
    long = "Be brief. " * 9
    settings = keep_system_prefix(CacheSettings(max_kv_size=64), tokenizer, long)
    cache = PrefixCache(model.make_cache(settings), settings)
    chat = Conversation(model, tokenizer, system=long)
    chat.adopt(cache)
    assert chat.cache[0].window.keep == len(system_prefix(tokenizer, long))
    chat.system = "Be brief."
    assert chat.cache[0].window.keep == len(system_prefix(tokenizer, "Be brief."))
    assert chat.cache[0].window.max_size == 64


def test_setting_the_system_prompt_settles_an_answer_left_half_read(chat, model, tokenizer) -> None:
    model.replies = [tokenizer.encode("one two three")]
    left = chat.send("Count!")
    next(left)
    chat.system = "Be long."
    assert list(left) == []
    assert [m["content"] for m in chat.messages] == ["Be long.", "Count!", "one"]
    assert chat.ids == expected_ids(chat)


def test_a_refused_message_changes_nothing(chat, model) -> None:
    say(chat, "One?", "first")
    before = chat.messages, chat.ids
    with pytest.raises(UserError, match="empty"):
        chat.send("")
    with pytest.raises(UserError, match="temperature is -1"):
        list(chat.send("Two?", temperature=-1))
    assert (chat.messages, chat.ids) == before
    say(chat, "Two?", "second")
    assert chat.ids == expected_ids(chat)


def test_settings_hold_for_every_turn_and_options_for_one(model, tokenizer) -> None:
    chat = Conversation(model, tokenizer, settings={"max_tokens": 3})
    assert len(list(chat.send("One?"))) == 3
    assert len(list(chat.send("Two?", max_tokens=5))) == 5
    assert len(list(chat.retry())) == 3


def test_the_repetition_penalty_counts_the_whole_conversation(chat, model, tokenizer) -> None:
    say(chat, "One?", "zebra")
    zebra = tokenizer.encode("zebra")
    model.replies = [zebra]
    (step,) = chat.send("Two?", max_tokens=1, repetition_penalty=1e9)
    assert step.token != zebra[0]


def test_a_full_context_stops_before_anything_is_changed(model, tokenizer) -> None:
    chat = Conversation(model, tokenizer, system="Be brief.", max_context=80)
    steps = say(chat, "One?", "word " * 100, ends=False)
    assert steps[-1].finish_reason == "length"
    assert chat.used == chat.capacity == 80
    before = chat.messages, chat.ids, len(model.prompts)
    with pytest.raises(ContextFull) as full:
        chat.send("Two?")
    assert (chat.messages, chat.ids, len(model.prompts)) == before
    for what in ("80 of 80", "undo", "reset", "roll", "larger context"):
        assert what in str(full.value)
    chat.undo()
    say(chat, "Short?", "Yes.")
    assert chat.ids == expected_ids(chat)


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_an_answer_ends_where_the_context_does(model, tokenizer, max_tokens) -> None:
    chat = Conversation(model, tokenizer, max_context=80)
    steps = say(chat, "One?", "word " * 100, ends=False, max_tokens=max_tokens)
    assert (chat.used, steps[-1].finish_reason) == (80, "length")


@pytest.mark.parametrize("overflow", ["stop", "roll"])
def test_a_message_longer_than_the_context_is_refused(model, tokenizer, overflow) -> None:
    chat = Conversation(model, tokenizer, overflow=overflow, max_context=80)
    say(chat, "One?", "first")
    chat.reset()
    with pytest.raises(ContextFull, match=r"the message takes \d+ tokens .* the context holds 80; shorten it"):
        chat.send("word " * 100)
    assert chat.messages == []


def test_rolling_keeps_the_system_prompt_and_the_last_message(model, tokenizer) -> None:
    chat = Conversation(model, tokenizer, system="Be brief.", overflow="roll", max_context=160)
    rolls = []
    for number in range(24):
        say(chat, f"Question {number}?", "An answer of some length, as they come.")
        if chat.dropped:
            rolls.append(number)
            assert chat.dropped % 2 == 0
            assert chat.fed > 20  # all after the system prompt is prefilled again
            assert chat.used <= chat.capacity
        assert chat.messages[0] == {"role": "system", "content": "Be brief."}
        assert chat.messages[-2]["content"] == f"Question {number}?"
        assert chat.messages[-1]["content"] == "An answer of some length, as they come."
        assert chat.ids == expected_ids(chat)
    assert len(rolls) >= 3
    assert min(b - a for a, b in zip(rolls, rolls[1:], strict=False)) > 1  # not at every turn


def test_rolling_leaves_room_for_an_answer(model, tokenizer) -> None:
    chat = Conversation(model, tokenizer, overflow="roll", max_context=160)
    say(chat, "One?", "word " * 130, ends=False)
    assert chat.used == 160
    say(chat, "Two?", "word " * 130, ends=False)
    assert chat.dropped == 2
    assert len(chat.messages[-1]["content"].split()) > 50


@pytest.mark.parametrize("context", [0, -1, 513])
def test_a_context_that_the_model_does_not_have_is_refused(model, tokenizer, context) -> None:
    with pytest.raises(UserError, match=f"context of {context} tokens is asked for; this model takes from 1 to 512"):
        Conversation(model, tokenizer, max_context=context)


def test_an_unknown_policy_is_refused(model, tokenizer) -> None:
    with pytest.raises(UserError, match="overflow is 'wrap'; it must be one of stop, roll"):
        Conversation(model, tokenizer, overflow="wrap")


def test_saved_and_loaded(chat, model, tokenizer) -> None:
    chat.settings = {"temperature": 0.5, "logit_bias": {7: -1.5}, "stop": ["END"], "seed": 3, "max_tokens": 4}
    say(chat, "Grüße, 世界 🙂?", "Naïve\n  café", max_tokens=50)
    loaded = Conversation.from_json(chat.to_json(), model, tokenizer)
    assert (loaded.messages, loaded.ids, loaded.settings) == (chat.messages, chat.ids, chat.settings)
    assert loaded.to_json() == chat.to_json()
    assert_next_is_that_of_a_fresh_pass(loaded, "Go on")


def test_lone_surrogates_can_be_saved(chat, model, tokenizer) -> None:
    say(chat, "caf\udce9 \ud800", "Oui.")
    text = chat.to_json()
    assert text.encode("utf-8")
    loaded = Conversation.from_json(text, model, tokenizer)
    assert loaded.messages[1]["content"] == "caf\ufffd \ufffd"
    assert loaded.ids == chat.ids


GOOD = {
    "format": "mlx-llama3 conversation",
    "version": 1,
    "system": None,
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "settings": {},
}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "other"}, 'is not a saved conversation: it has no "format"'),
        ({"version": 2}, "has version 2; this program reads version 1"),
        ({"system": 5}, "system is int; it must be text or null"),
        ({"messages": None}, "messages must be a list"),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "message 1 must have role 'user'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "message 1 of the user has no reply"),
        ({"messages": [{"role": "user", "content": ""}]}, "message 1 has no text in content"),
        ({"messages": [{"role": "user"}]}, "message 1 has no text in content"),
        ({"messages": ["a"]}, "message 1 must have role 'user'"),
        ({"settings": []}, "settings is list; it must be an object"),
        ({"settings": {"warmth": 1}}, "there is no setting 'warmth'"),
        ({"settings": {"temperature": "hot"}}, "temperature is hot; it must be a number from 0 (greedy)"),
        ({"settings": {"max_tokens": 0}}, "max_tokens is 0; it must be a whole number of at least 1"),
        ({"settings": {"stop": "END"}}, "stop must be a list of texts"),
        ({"settings": {"logit_bias": {"x": 1}}}, "logit_bias must be an object of token ids"),
        ({"settings": {"logit_bias": {"5": "x"}}}, "logit_bias 5:x must be a token id"),
    ],
)
def test_bad_files_are_refused_in_one_line(model, tokenizer, change, complaint) -> None:
    with pytest.raises(UserError, match=re.escape(complaint)) as caught:
        Conversation.from_json(json.dumps(GOOD | change), model, tokenizer, source="talk.json")
    assert str(caught.value).startswith("talk.json")
    assert "\n" not in str(caught.value)


def test_what_is_not_json_is_refused(model, tokenizer) -> None:
    with pytest.raises(UserError, match="talk.json is not JSON"):
        Conversation.from_json("{", model, tokenizer, source="talk.json")


def test_a_control_token_that_stops_an_answer_is_not_part_of_the_reply(chat, tokenizer) -> None:
    chat.model.replies = [[*tokenizer.encode("Yes."), tokenizer.special_tokens["<|im_start|>"]]]
    list(chat.send("Well?", stop=["<|im_start|>"]))
    assert chat.messages[-1]["content"] == "Yes."
    assert chat.ids == expected_ids(chat)


THINKING = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == "assistant" %}{{ m.content.split("</think>")[-1] | trim }}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


@pytest.fixture
def thinker(model, tokenizer) -> Conversation:
    """A chat whose template leaves the reasoning of earlier replies out, as that of DeepSeek-R1-Distill-Llama."""
    template = Tokenizer(tokenizer.vocabulary, templates={"default": THINKING})
    return Conversation(model, template, system="Be brief.", max_context=200)


def test_reasoning_of_earlier_replies_leaves_the_context(thinker, model) -> None:
    tokenizer = thinker.tokenizer
    say(thinker, "one plus one?", "one and one, so two.\n</think>\n\nTwo.")
    assert thinker.messages[-1]["content"].startswith("one and one")
    whole = thinker.ids  # before the next message the cache holds the reasoning, and a retry or a trace needs it
    assert "so two" in tokenizer.decode(whole)
    say(thinker, "and three?", "three, hm.\n</think>\n\nFour.")
    assert thinker.prompt_ids == tokenizer.encode_chat(thinker.messages[:-1])
    assert "so two" not in tokenizer.decode(thinker.prompt_ids) and "Two." in tokenizer.decode(thinker.prompt_ids)
    assert thinker.ids == [*thinker.prompt_ids, *tokenizer.encode("three, hm.\n</think>\n\nFour.")]
    assert thinker.used == len(thinker.ids)
    # Only what follows the first reply's header is fed, and the keys are those of the ids.
    assert model.prompts[1] == thinker.fed < len(thinker.prompt_ids) - 20
    thinker.cut_cache(len(thinker.prompt_ids))
    ids, cache = thinker.prompt_ids, thinker.cache
    assert cache[0].offset == len(ids)
    model._script = []
    got = model.head(model.residual(mx.array([[5]]), len(ids), cache))[0, -1]
    np.testing.assert_allclose(np.array(got), np.array(model.plain_logits([*ids, 5])), rtol=1e-4, atol=1e-4)
    thinker.undo()
    assert thinker.ids == whole


def test_reasoning_does_not_fill_the_context(model, tokenizer, thinker) -> None:
    for number in range(6):  # with their reasoning, the replies take more than 200 tokens
        say(thinker, f"{number}?", "so " * 50 + "\n</think>\nYes.")
        assert thinker.prompt_ids == thinker.tokenizer.encode_chat(thinker.messages[:-1])
        assert thinker.dropped == 0
    assert len(thinker.messages) == 13
