"""The values of the page after another model was loaded."""

import gradio as gr
import pytest
from watched_model import WatchedModel

from app.options.model import OpenModel
from app.ui.panels import chat as chat_panel, conversations as conversations_panel, settings as settings_panel
from app.ui.session.mlx_thread import Engine
from app.ui.session.services import Services
from app.ui.session.session import ChatRequest, Sessions


@pytest.fixture
def conversations(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_LLAMA3_DATA", str(tmp_path))
    engine, sessions = Engine(), Sessions()
    with gr.Blocks():
        services = Services(engine, sessions, gr.State(None), gr.State(0))
        panel, chat = conversations_panel.build(), chat_panel.build(gr.HTML())
        conversations = conversations_panel.connect(panel, chat, settings_panel.build(), services)
    model = WatchedModel(vocab_size=tokenizer.vocab_size)
    engine.run(sessions.open_model, OpenModel("tiny", model, tokenizer))
    yield conversations
    engine.close()


def test_after_a_load_everything_is_shown(conversations):
    session = conversations.services.engine.run(conversations.services.sessions.add)
    values = dict(zip(conversations.outputs, conversations.refresh(session.id, ""), strict=True))
    assert values[conversations.services.session_id] == session.id
    assert values[conversations.chat.chatbot] == []
    assert values[conversations.chat.send]["visible"] is True and values[conversations.chat.stop]["visible"] is False


def test_what_was_asked_before_a_load_was_shown_goes_on(conversations):
    """The answer's own updates show the chat; only the views are told of the new model."""
    services = conversations.services
    session = services.engine.run(services.sessions.add)
    session.request = ChatRequest(session.send, [], "Hi")
    before = services.next_change()
    values = dict(zip(conversations.outputs, conversations.refresh(session.id, ""), strict=True))
    assert values.pop(services.generation_done) > before
    assert all(value == gr.skip() for value in values.values())


def test_without_a_model_nothing_is_shown(conversations):
    conversations.services.engine.run(conversations.services.sessions.close_model)
    assert all(value == gr.skip() for value in conversations.refresh("gone", ""))
