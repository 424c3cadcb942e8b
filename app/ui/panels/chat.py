"""The chat panel: messages, composer, Send and Stop; while an answer runs it also feeds the live heat map."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import gradio as gr

from app.ui.heat_map import heat_map
from app.ui.html import gauge, notice
from app.ui.panels import settings as settings_panel
from app.ui.panels.settings import SettingsPanel
from app.ui.session.answering import AnswerProgress, answer
from app.ui.session.failures import explained
from app.ui.session.services import Services
from app.ui.session.session import ChatRequest, Session

# Only one answer or model load runs at a time, over all tabs; the others wait in Gradio's queue.
MODEL_QUEUE = {"concurrency_id": "model", "concurrency_limit": 1}
QUICK = {"queue": False, "show_progress": "hidden"}
# For events that output `generation_done`: `Services` explains why they are queued.
REDRAWING = {"concurrency_limit": None, "show_progress": "hidden"}
# A text of more characters is sent at most once in so many seconds.
_LONG, _LONG_PAUSE = 4000, 0.25


@dataclass(frozen=True)
class ChatPanel:
    """The chat's components, and `gauge` in the top bar."""

    chatbot: gr.Chatbot
    notice: gr.HTML
    composer: gr.Textbox
    send: gr.Button
    stop: gr.Button
    gauge: gr.HTML

    def values(self, session: Session) -> list[Any]:
        """The values of `outputs` for a session that is not answering."""
        return [session.messages, "", gr.update(visible=True), gr.update(visible=False), _gauge(session)]

    @property
    def outputs(self) -> list[Any]:
        """The components that `values` sets."""
        return [self.chatbot, self.notice, self.send, self.stop, self.gauge]


def build(gauge_place: gr.HTML) -> ChatPanel:
    """Make the components in the current column."""
    chatbot = gr.Chatbot(
        elem_id="chat",
        label="Conversation",
        show_label=False,
        container=False,
        height=None,
        layout="bubble",
        editable="user",
        buttons=["copy"],
        feedback_options=None,
        latex_delimiters=[],
        allow_tags=False,
        group_consecutive_messages=False,
        placeholder="Ask something. What the model does inside appears on the right while it speaks.",
    )
    notice_place = gr.HTML(elem_id="chat-notice")
    with gr.Row(elem_id="composer-row"):
        composer = gr.Textbox(
            elem_id="composer",
            label="Message",
            show_label=False,
            container=False,
            lines=1,
            max_lines=6,
            autofocus=True,
            placeholder="Message (press / to come here)",
        )
        send = gr.Button("Send", variant="primary", elem_id="send", min_width=84, scale=0)
        stop = gr.Button("Stop", variant="stop", elem_id="stop", min_width=84, scale=0, visible=False)
    return ChatPanel(chatbot, notice_place, composer, send, stop, gauge_place)


def connect(panel: ChatPanel, services: Services, settings: SettingsPanel, live_heat: Any) -> list[Any]:
    """Connect the panel's events; returns the events that end an answer. live_heat: the live heat map."""
    chat, tab = _Chat(services), services.session_id
    chat_outputs = [panel.chatbot, panel.composer, panel.notice, panel.send, panel.stop]
    panel.stop.click(chat.stop, [tab], None, **QUICK)
    panel.chatbot.undo(chat.undo, [tab], [*chat_outputs, panel.gauge, services.generation_done], **REDRAWING)
    questions = [
        gr.on([panel.composer.submit, panel.send.click], chat.ask, [tab, panel.composer], chat_outputs, **QUICK),
        panel.chatbot.retry(chat.ask_again, [tab], chat_outputs, **QUICK),
        panel.chatbot.edit(chat.ask_edited, [tab], chat_outputs, **QUICK),
    ]
    inputs = [tab, *settings.inputs]
    outputs = [*chat_outputs, panel.gauge, live_heat, services.generation_done]
    return [
        question.success(chat.answer, inputs, outputs, show_progress="hidden", **MODEL_QUEUE) for question in questions
    ]


@dataclass
class _Sent:
    """What the browser has of a running answer: norms of `positions` positions, and text as of `text_time`."""

    positions: int | None = None
    text_time: float = 0.0

    def text_is_due(self, text: str) -> bool:
        """Whether to send the text now: a long one is sent less often, because the browser redraws the whole text."""
        if len(text) > _LONG and monotonic() - self.text_time < _LONG_PAUSE:
            return False
        self.text_time = monotonic()
        return True


@dataclass(frozen=True)
class _Chat:
    """The event handlers. Their values: chatbot, composer, notice, send, stop, gauge, heat map, generation_done."""

    services: Services

    def ask(self, session_id: str, text: str) -> tuple[Any, ...]:
        """Accept a message; the answer itself waits in the queue."""
        session = self.idle(session_id)
        if not text.strip():
            raise self.services.error("The message is empty: write something first.")
        messages = [*session.messages, {"role": "user", "content": text}]
        return self._waiting(session, ChatRequest(partial(session.send, text), messages, text))

    def ask_again(self, session_id: str) -> tuple[Any, ...]:
        """Answer the last message again."""
        session = self.idle(session_id)
        return self._waiting(session, ChatRequest(session.retry, session.messages[:-1], ""))

    def ask_edited(self, session_id: str, edit: gr.EditData) -> tuple[Any, ...]:
        """Answer an edited message; the messages after it are removed."""
        session = self.idle(session_id)
        index, text = edit.index if isinstance(edit.index, int) else edit.index[0], str(edit.value)
        if not text.strip():
            raise self.services.error("The message is empty: nothing was changed.")
        messages = [*session.messages[:index], {"role": "user", "content": text}]
        return self._waiting(session, ChatRequest(partial(session.send_instead, index // 2, text), messages, text))

    def undo(self, session_id: str) -> tuple[Any, ...]:
        """Move the last message back into the composer."""
        session = self.idle(session_id)
        text = self.services.engine.run(session.conversation.undo)
        session.trace.truncate(session.conversation.used)
        return (*self._at_rest(session, text), _gauge(session), self.services.next_change())

    def answer(self, session_id: str, *settings: Any) -> Iterator[tuple[Any, ...]]:
        """Stream the answer to the session's request."""
        session = self.services.need_session(session_id)
        request = session.request
        if request is None:
            return
        try:
            progress = AnswerProgress(reason="stopped")
            if not request.stop.is_set():
                self.services.engine.run(settings_panel.apply, session.conversation, *settings)
                sent = _Sent()
                for progress in answer(self.services.engine, session, request):
                    yield self._running(session, request, progress, sent)
                session.save()
            yield self._ended(session, request, progress)
        except Exception as error:  # the app continues after any error; `explained` also logs it
            yield self._ended(session, request, AnswerProgress(reason="failed"), explained(error))
        finally:
            session.done(request)

    def stop(self, session_id: str) -> None:
        """Stop the answer, also one that waits in the queue. The answer's own last update shows the result."""
        session = self.services.session(session_id)
        if session is not None and session.request is not None:
            session.request.stop.set()

    def idle(self, session_id: str) -> Session:
        """The session. Raises a `gr.Error` while it is answering."""
        session = self.services.need_session(session_id)
        if session.request is not None:
            raise self.services.error("The answer is still being written: wait for it, or press Esc to stop it.")
        return session

    def _waiting(self, session: Session, request: ChatRequest) -> tuple[Any, ...]:
        session.request = request
        return (
            request.messages,
            "",
            notice("Waiting for the model …"),
            gr.update(visible=False),
            gr.update(visible=True),
        )

    def _running(
        self, session: Session, request: ChatRequest, progress: AnswerProgress, sent: _Sent
    ) -> tuple[Any, ...]:
        """An update of a running answer; records in `sent` what it contains."""
        messages, status, norms, conversation = gr.skip(), "", gr.skip(), session.conversation
        if progress.text and sent.text_is_due(progress.text):
            messages = [*request.messages, {"role": "assistant", "content": progress.text}]
        if progress.tokens:
            if sent.positions is None:
                sent.positions = len(conversation.prompt_ids) - conversation.fed
            norms = heat_map.payload(session.trace, sent.positions)
            sent.positions += len(norms["tokens"])
        elif progress.read:
            status = notice(f"Reading the prompt: {progress.read} of {progress.to_read} tokens …")
        usage = gauge(session.trace.norms.shape[-1], conversation.capacity, progress.speed, _drafts(session))
        return messages, gr.skip(), status, gr.skip(), gr.skip(), usage, norms, gr.skip()

    def _ended(
        self, session: Session, request: ChatRequest, progress: AnswerProgress, failure: str = ""
    ) -> tuple[Any, ...]:
        text = gr.skip() if progress.text.strip() else request.text or gr.skip()
        status = notice(failure, "error") if failure else notice(_end(session, request, progress))
        chatbot, composer, _, send, stop = self._at_rest(session, text)
        usage = _gauge(session, progress.speed)
        return chatbot, composer, status, send, stop, usage, gr.skip(), self.services.next_change()

    def _at_rest(self, session: Session, composer: Any) -> tuple[Any, ...]:
        return session.messages, composer, "", gr.update(visible=True), gr.update(visible=False)


def _gauge(session: Session, speed: float = 0.0) -> str:
    return gauge(session.conversation.used, session.conversation.capacity, speed, _drafts(session))


def _drafts(session: Session) -> str:
    draft = session.conversation.draft
    return f"{draft.acceptance:.0%} of {draft.proposed} drafted tokens were right" if draft and draft.proposed else ""


def _end(session: Session, request: ChatRequest, progress: AnswerProgress) -> str:
    """A sentence on how the answer ended; "" if it ended normally."""
    dropped = session.conversation.dropped
    note = f"The oldest {dropped} messages were left out to make room. " if dropped else ""
    if not progress.text.strip():
        cause = "Stopped before the answer began" if progress.reason == "stopped" else "The model said nothing"
        return f"{note}{cause}; the message is back in the composer."
    settings = session.conversation.settings
    if request.text == "" and settings["temperature"] == 0:
        note += "Temperature is 0, so every answer is the same; the settings allow others. "
    elif request.text == "" and settings.get("seed") is not None:
        note += "The seed is fixed, so every answer is the same; the settings allow others. "
    if progress.reason == "stopped":
        return f"{note}Stopped; what was said is kept."
    if progress.reason == "length" and session.conversation.used >= session.conversation.capacity:
        return f"{note}The context is full: the answer ends here."
    if progress.reason == "length":
        return f"{note}Cut off at {settings['max_tokens']} tokens; the settings allow more."
    return note
