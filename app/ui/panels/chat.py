"""The chat: messages, the composer, Send and Stop; every answer with the live heat map beside it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import gradio as gr

from app.ui.heat_map import heat_map as heat
from app.ui.html import gauge, notice
from app.ui.panels import settings as settings_panel
from app.ui.panels.settings import SettingsPanel
from app.ui.session.answering import AnswerProgress, answer
from app.ui.session.failures import explained
from app.ui.session.services import Services
from app.ui.session.session import Asked, Session

# One answer or loading of a model at a time, whatever the tab: the others wait in Gradio's queue.
MODEL_QUEUE = {"concurrency_id": "model", "concurrency_limit": 1}
QUICK = {"queue": False, "show_progress": "hidden"}
# For events that output `generation_done`, as `Services` says.
TELLING = {"concurrency_limit": None, "show_progress": "hidden"}
_LONG, _LONG_PAUSE = 4000, 0.25  # characters, seconds


@dataclass(frozen=True)
class ChatPanel:
    """The chat's components, and `gauge` in the top bar."""

    chatbot: gr.Chatbot
    notice: gr.HTML
    composer: gr.Textbox
    send: gr.Button
    stop: gr.Button
    gauge: gr.HTML

    def shown(self, session: Session) -> list[Any]:
        """Values for `outputs`: the conversation as it is, at rest."""
        return [session.messages, "", gr.update(visible=True), gr.update(visible=False), _gauge(session)]

    @property
    def outputs(self) -> list[Any]:
        """The components that `shown` gives values for."""
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
    said = gr.HTML(elem_id="chat-notice")
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
    return ChatPanel(chatbot, said, composer, send, stop, gauge_place)


def connect(panel: ChatPanel, services: Services, settings: SettingsPanel, live_heat: Any) -> list[Any]:
    """Wire the panel's events; returns those that follow an answer. `live_heat` takes `heat.payload`."""
    chat, tab = _Chat(services), services.session_id
    asked = [panel.chatbot, panel.composer, panel.notice, panel.send, panel.stop]
    panel.stop.click(chat.stop, [tab], None, **QUICK)
    panel.chatbot.undo(chat.undo, [tab], [*asked, panel.gauge, services.generation_done], **TELLING)
    questions = [
        gr.on([panel.composer.submit, panel.send.click], chat.ask, [tab, panel.composer], asked, **QUICK),
        panel.chatbot.retry(chat.ask_again, [tab], asked, **QUICK),
        panel.chatbot.edit(chat.ask_edited, [tab], asked, **QUICK),
    ]
    inputs = [tab, *settings.inputs]
    outputs = [*asked, panel.gauge, live_heat, services.generation_done]
    return [each.success(chat.answer, inputs, outputs, show_progress="hidden", **MODEL_QUEUE) for each in questions]


@dataclass
class _Page:
    """What the browser has of a running answer: norms of so many `positions`, and since when the text."""

    positions: int | None = None
    text_since: float = 0.0

    def text_is_due(self, text: str) -> bool:
        """Whether to send the text now: a long one less often, for the browser draws it anew as a whole."""
        if len(text) > _LONG and monotonic() - self.text_since < _LONG_PAUSE:
            return False
        self.text_since = monotonic()
        return True


@dataclass(frozen=True)
class _Chat:
    """What the events do. Their values are for: chatbot, composer, notice, send, stop, gauge, heat, generation_done."""

    services: Services

    def ask(self, session_id: str, text: str) -> tuple[Any, ...]:
        """Take a message; the answer itself waits in the queue."""
        session = self.idle(session_id)
        if not text.strip():
            raise self.services.error("The message is empty: write something first.")
        shown = [*session.messages, {"role": "user", "content": text}]
        return self._waiting(session, Asked(partial(session.send, text), shown, text))

    def ask_again(self, session_id: str) -> tuple[Any, ...]:
        """Have the last message answered once more."""
        session = self.idle(session_id)
        return self._waiting(session, Asked(session.retry, session.messages[:-1], ""))

    def ask_edited(self, session_id: str, edit: gr.EditData) -> tuple[Any, ...]:
        """Answer a changed message; what came after it is forgotten."""
        session = self.idle(session_id)
        index, text = edit.index if isinstance(edit.index, int) else edit.index[0], str(edit.value)
        if not text.strip():
            raise self.services.error("The message is empty: nothing was changed.")
        shown = [*session.messages[:index], {"role": "user", "content": text}]
        return self._waiting(session, Asked(partial(session.send_instead, index // 2, text), shown, text))

    def undo(self, session_id: str) -> tuple[Any, ...]:
        """Take the last message back into the composer."""
        session = self.idle(session_id)
        text = self.services.engine.run(session.conversation.undo)
        session.trace.truncate(session.conversation.used)
        return (*self._rest(session, text), _gauge(session), self.services.next_change())

    def answer(self, session_id: str, *settings: Any) -> Iterator[tuple[Any, ...]]:
        """Stream the answer to what was asked."""
        session = self.services.need_session(session_id)
        asked = session.asked
        if asked is None:
            return
        try:
            progress = AnswerProgress(reason="stopped")
            if not asked.stop.is_set():
                self.services.engine.run(settings_panel.apply, session.conversation, *settings)
                page = _Page()
                for progress in answer(self.services.engine, session, asked):
                    yield self._running(session, asked, progress, page)
                session.save()
            yield self._ended(session, asked, progress)
        except Exception as error:  # whatever it was, the app goes on; `explained` tells and logs it
            yield self._ended(session, asked, AnswerProgress(reason="failed"), explained(error))
        finally:
            session.done(asked)

    def stop(self, session_id: str) -> None:
        """End the answer, also one that waits in the queue. The answer's own last update tells of it."""
        session = self.services.session(session_id)
        if session is not None and session.asked is not None:
            session.asked.stop.set()

    def idle(self, session_id: str) -> Session:
        """The session, if it is not answering."""
        session = self.services.need_session(session_id)
        if session.asked is not None:
            raise self.services.error("The answer is still being written: wait for it, or press Esc to stop it.")
        return session

    def _waiting(self, session: Session, asked: Asked) -> tuple[Any, ...]:
        session.asked = asked
        return asked.shown, "", notice("Waiting for the model …"), gr.update(visible=False), gr.update(visible=True)

    def _running(self, session: Session, asked: Asked, progress: AnswerProgress, page: "_Page") -> tuple[Any, ...]:
        """An update while the answer comes; notes in `page` what the browser then has."""
        shown, said, norms, conversation = gr.skip(), "", gr.skip(), session.conversation
        if progress.text and page.text_is_due(progress.text):
            shown = [*asked.shown, {"role": "assistant", "content": progress.text}]
        if progress.tokens:
            if page.positions is None:
                page.positions = len(conversation.prompt_ids) - conversation.fed
            norms = heat.payload(session.trace, page.positions)
            page.positions += len(norms["tokens"])
        elif progress.read:
            said = notice(f"Reading the prompt: {progress.read} of {progress.to_read} tokens …")
        filled = gauge(session.trace.norms.shape[-1], conversation.capacity, progress.speed, _drafts(session))
        return shown, gr.skip(), said, gr.skip(), gr.skip(), filled, norms, gr.skip()

    def _ended(self, session: Session, asked: Asked, progress: AnswerProgress, failure: str = "") -> tuple[Any, ...]:
        text = gr.skip() if progress.text.strip() else asked.text or gr.skip()
        said = notice(failure, "error") if failure else notice(_end(session, asked, progress))
        chatbot, composer, _, send, stop = self._rest(session, text)
        filled = _gauge(session, progress.speed)
        return chatbot, composer, said, send, stop, filled, gr.skip(), self.services.next_change()

    def _rest(self, session: Session, composer: Any) -> tuple[Any, ...]:
        return session.messages, composer, "", gr.update(visible=True), gr.update(visible=False)


def _gauge(session: Session, speed: float = 0.0) -> str:
    return gauge(session.conversation.used, session.conversation.capacity, speed, _drafts(session))


def _drafts(session: Session) -> str:
    draft = session.conversation.draft
    return f"{draft.acceptance:.0%} of {draft.proposed} drafted tokens were right" if draft and draft.proposed else ""


def _end(session: Session, asked: Asked, progress: AnswerProgress) -> str:
    """Why the answer ended, where that needs a word."""
    dropped = session.conversation.dropped
    said = f"The oldest {dropped} messages were left out to make room. " if dropped else ""
    if not progress.text.strip():
        how = "Stopped before the answer began" if progress.reason == "stopped" else "The model said nothing"
        return f"{said}{how}; the message is back in the composer."
    settings = session.conversation.settings
    if asked.text == "" and settings["temperature"] == 0:
        said += "Temperature is 0, so every answer is the same; the settings allow others. "
    elif asked.text == "" and settings.get("seed") is not None:
        said += "The seed is fixed, so every answer is the same; the settings allow others. "
    if progress.reason == "stopped":
        return f"{said}Stopped; what was said is kept."
    if progress.reason == "length" and session.conversation.used >= session.conversation.capacity:
        return f"{said}The context is full: the answer ends here."
    if progress.reason == "length":
        return f"{said}Cut off at {settings['max_tokens']} tokens; the settings allow more."
    return said
