"""Sessions: conversation and trace, edits, limits; a tiny model with the demo's tokenizer."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from watched_model import WatchedModel

from app.options.model import OpenModel
from app.ui.session.session import MOST_SESSIONS, ChatRequest, Session, Sessions
from mlx_llama3.errors import UserError
from mlx_llama3.model.cache.quantized import QuantizedKVCache
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.hooks.edits import Scale
from mlx_llama3.model.hooks.norms import POINTS, NormCapture
from mlx_llama3.model.residual import plain as plain_stream

import mlx.core as mx


@pytest.fixture
def opened(tokenizer, tmp_path, monkeypatch) -> OpenModel:
    monkeypatch.setenv("MLX_LLAMA3_DATA", str(tmp_path))
    return OpenModel("tiny", WatchedModel(vocab_size=tokenizer.vocab_size, max_seq_len=2048), tokenizer)


@pytest.fixture
def session(opened) -> Session:
    return Session(opened)


def say(session: Session, text: str, reply: str | None = None, *, stop_after: int | None = None, **options) -> str:
    if reply is not None:
        tokenizer = session.opened.tokenizer
        session.opened.model.replies = [[*tokenizer.encode(reply), min(tokenizer.stop_ids)]]
    steps = session.answer(ChatRequest(partial(session.send, text), [], text), max_tokens=24, **options)
    answer = ""
    for number, step in enumerate(steps, 1):
        answer += step.text
        if number == stop_after:
            session.settle()
            break
    return answer


def check_trace(session: Session) -> None:
    """Check that the trace has the conversation's ids, and the norms of one pass over them."""
    ids = session.trace.tokens.tolist()
    assert ids == session.conversation.ids[: len(ids)]
    assert len(ids) >= session.conversation.used - 1
    assert len(session.trace.pieces) == len(ids) == session.trace.norms.shape[-1]
    capture = NormCapture(session.conversation.model)
    plain_stream(capture.model.residual(mx.array([ids])))
    expected = NormCapture.read(capture.take())
    np.testing.assert_allclose(session.trace.norms, expected, rtol=1e-4)


def test_the_trace_covers_every_position_over_several_turns(session):
    say(session, "Hello", "Good day to you.")
    check_trace(session)
    say(session, "Again", "And once more.")
    check_trace(session)
    assert "".join(session.trace.pieces).count("<|im_start|>user") == 2


def test_a_stopped_answer_leaves_no_gap(session):
    answer = say(session, "Hello", "One two three four five six seven eight nine.", stop_after=4)
    assert session.messages[-1]["content"] == answer
    check_trace(session)
    say(session, "Go on", "Ten.")
    check_trace(session)


def test_undo_and_another_question_cut_the_trace(session):
    say(session, "Hello", "Good day to you.")
    say(session, "Again", "And once more.")
    before = session.trace.norms.shape[-1]
    say(session, "x", None)
    steps = session.answer(ChatRequest(partial(session.send_instead, 1, "Other"), [], "Other"), max_tokens=2)
    assert [step.token for step in steps]
    assert [message["content"] for message in session.messages][::2] == ["Hello", "Other"]
    assert session.trace.norms.shape[-1] < before
    check_trace(session)


def test_edits_measure_anew_and_leave_the_model_alone(session, opened):
    say(session, "Hello", "Good day to you.")
    plain = session.trace
    session.set_edits([Scale(1, "mlp", 0.0)])
    assert session.trace.norms.shape == (len(POINTS), 3, 0) and session.trace is not plain
    say(session, "Again", "And once more.")
    check_trace(session)
    mlp = session.trace.norm("mlp_out")
    assert (mlp[1] == 0).all() and (mlp[0] > 0).all()
    assert "Scale(layer=1" in session.trace.settings["edits"][0]
    session.set_edits([])
    assert session.conversation.model is opened.model
    with pytest.raises(UserError, match="layers 0 to 2"):
        session.set_edits([Scale(9, "mlp", 0.0)])
    assert session.edits == []


def test_look_gives_the_states_of_a_traced_position(session):
    say(session, "Hello", "Good day to you.")
    states = session.look(5).states
    norms = np.linalg.norm(np.array(states["resid_post"]), axis=-1)
    np.testing.assert_allclose(norms, session.trace.norm("resid_post")[:, 5], rtol=1e-4)


def test_saved_and_opened_again(session, opened):
    say(session, "Hello", "Good day to you.")
    session.save()
    other = Session(opened)
    other.open(opened, session.saved_id)
    assert (other.messages, other.title) == (session.messages, "Hello")
    with pytest.raises(UserError, match="no such conversation"):
        other.open(opened, "../x")
    assert other.messages == session.messages
    other.open(opened)
    assert other.messages == [] and other.saved_id != session.saved_id


def test_another_model_goes_on_with_what_was_said(opened):
    sessions = Sessions()
    sessions.open_model(opened)
    session = sessions.add()
    say(session, "Hello", "Good day to you.")
    session.set_edits([Scale(0, "mlp", 0.0)])
    messages = session.messages
    sessions.close_model()
    assert sessions.find(session.id) is None
    other = OpenModel("other", WatchedModel(vocab_size=opened.tokenizer.vocab_size, max_seq_len=512), opened.tokenizer)
    sessions.open_model(other)
    assert sessions.find(session.id) is session
    assert (session.messages, session.edits, session.model_name) == (messages, [], "other")
    assert session.trace.tokens.size == 0


def test_conversations_use_the_requested_cache(opened):
    """New, saved and reopened conversations; a model that does not support the cache is not opened."""
    sessions = Sessions(CacheSettings(kv_bits=8))
    with pytest.raises(UserError, match="heads of a multiple of 64, and this model's have 16"):
        sessions.open_model(opened)
    assert sessions.opened is None
    wide = WatchedModel(vocab_size=opened.tokenizer.vocab_size, max_seq_len=2048, head_dim=64)
    opened = opened._replace(model=wide)
    sessions.open_model(opened)
    session = sessions.add()
    say(session, "Hello " * 150, "Good day to you.")
    assert isinstance(session.conversation.cache[0], QuantizedKVCache)
    assert session.trace.norms.shape[-1] == len(session.trace.tokens) >= session.conversation.used - 1
    position = session.look(20)
    assert position.cache[0].offset == 21
    session.save()
    saved_id = session.saved_id
    session.open(opened)
    session.open(opened, saved_id)
    assert isinstance(session.conversation.cache[0], QuantizedKVCache)
    sessions.close_model()
    sessions.open_model(opened)
    assert isinstance(session.conversation.cache[0], QuantizedKVCache)


def test_the_least_recently_used_session_goes_first(opened):
    sessions = Sessions()
    sessions.open_model(opened)
    first, second = sessions.add(), sessions.add()
    sessions.find(first.id)
    for _ in range(MOST_SESSIONS - 1):
        sessions.add()
    assert sessions.find(first.id) is first
    assert sessions.find(second.id) is None
    assert sessions.find(None) is None and sessions.find("unknown") is None


@pytest.mark.parametrize(
    "turns", [60, pytest.param(500, marks=pytest.mark.skipif("SOAK" not in os.environ, reason="make soak"))]
)
def test_many_turns_keep_memory_flat(opened, turns):
    """With overflow "roll" and a full context, memory does not grow in the last two thirds of the turns."""
    session = Session(opened)
    session.conversation.overflow = "roll"
    readings: list[tuple[float, float]] = []
    for turn in range(turns):
        say(session, f"Question {turn}, " + "and what of it? " * 12, "This is what of it.")
        opened.model.prompts.clear()
        readings.append((resident(), mx.get_active_memory() / 1e6))
    assert session.conversation.dropped or session.conversation.used < session.conversation.capacity
    assert session.trace.norms.shape[-1] <= session.conversation.capacity
    later = readings[turns // 3 :]
    assert later[-1][0] - later[0][0] < 30, "MB of resident memory gained"
    assert later[-1][1] - later[0][1] < 5, "MB of MLX arrays gained"
    check_trace(session)


def resident() -> float:
    """The resident memory of this process in MB."""
    if not Path("/proc/self/statm").exists():
        return 0.0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
