"""The panel of saved conversations: choose, create, rename or delete one; and restore one when the page is opened."""

import json
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.ui.panels.chat import QUICK, REDRAWING, ChatPanel
from app.ui.panels.settings import SettingsPanel
from app.ui.session import saved_conversations
from app.ui.session.failures import explained
from app.ui.session.services import Services
from app.ui.session.session import Session
from mlx_llama3.errors import UserError

NEW = "new"


@dataclass(frozen=True)
class ConversationsPanel:
    """The components. memory: JSON that this browser tab remembers across a reload."""

    chooser: gr.Dropdown
    new: gr.Button
    rename: gr.Button
    delete: gr.Button
    title: gr.Textbox
    memory: gr.Textbox


def build() -> ConversationsPanel:
    """Make the components above the chat."""
    with gr.Row(elem_id="conversations"):
        chooser = gr.Dropdown(
            [("New conversation", NEW)],
            value=NEW,
            label="Conversation",
            show_label=False,
            container=False,
            elem_id="conversation",
            min_width=120,
        )
        new = gr.Button("New", size="sm", elem_id="new", min_width=52, scale=0)
        rename = gr.Button("Rename", size="sm", elem_id="rename", min_width=72, scale=0)
        delete = gr.Button("Delete", size="sm", elem_id="delete", min_width=66, scale=0)
    title = gr.Textbox(
        label="New title",
        show_label=False,
        container=False,
        placeholder="New title, then Enter",
        elem_id="title",
        visible=False,
    )
    return ConversationsPanel(chooser, new, rename, delete, title, gr.Textbox(visible="hidden", elem_id="memory"))


def connect(panel: ConversationsPanel, chat: ChatPanel, settings: SettingsPanel, services: Services) -> "Conversations":
    """Connect the panel's events; returns their handlers, which the page and the model chooser use, too."""
    conversations = Conversations(panel, chat, settings, services)
    tab = services.session_id
    panel.chooser.input(conversations.choose, [tab, panel.chooser], conversations.outputs, **REDRAWING)
    panel.new.click(conversations.begin, [tab], conversations.outputs, **REDRAWING)
    panel.delete.click(conversations.delete, [tab], conversations.outputs, js=_CONFIRM, **REDRAWING)
    panel.rename.click(conversations.ask_title, [tab], [panel.title], **QUICK).success(None, js=_FOCUS_TITLE)
    panel.title.submit(conversations.rename, [tab, panel.title], [panel.title, panel.chooser], **QUICK)
    panel.memory.change(None, [panel.memory], None, js=_REMEMBER)
    return conversations


_REMEMBER = "(memory) => { sessionStorage.setItem('mlx-llama3', memory); }"
RECALL = "() => sessionStorage.getItem('mlx-llama3') || ''"
_FOCUS_TITLE = "() => setTimeout(() => document.querySelector('#title textarea, #title input')?.select(), 50)"
_CONFIRM = "(tab) => confirm('Delete this conversation for good?') ? tab : ''"


@dataclass(frozen=True)
class Conversations:
    """The event handlers. outputs: all components that belong to a conversation; `values` sets them."""

    panel: ConversationsPanel
    chat: ChatPanel
    settings: SettingsPanel
    services: Services

    @property
    def outputs(self) -> list[Any]:
        """All components that belong to a conversation."""
        return [
            self.services.session_id,
            self.panel.memory,
            self.panel.chooser,
            *self.chat.outputs,
            *self.settings.inputs,
            self.services.generation_done,
        ]

    @property
    def unchanged(self) -> list[Any]:
        """Values for `outputs` that change nothing."""
        return [gr.skip()] * len(self.outputs)

    def values(self, session: Session, *, keep_settings: bool = False) -> list[Any]:
        """The values of `outputs` for a session; `keep_settings` leaves the settings panel unchanged."""
        settings = self.settings.values(session.conversation)
        memory = json.dumps({"session": session.id, "conversation": session.saved_id})
        return [
            session.id,
            memory,
            self.choices(session),
            *self.chat.values(session),
            *([gr.skip()] * len(settings) if keep_settings else settings),
            self.services.next_change(),
        ]

    def arrive(self, memory: str) -> list[Any]:
        """Show the tab's previous conversation, or a new one, after the page was opened or reloaded."""
        if self.services.sessions.opened is None:
            return self.unchanged
        remembered = _read_memory(memory)
        session = self.services.session(remembered.get("session"))
        if session is None:
            session = self.services.engine.run(self.services.sessions.add)
            self._recall(session, remembered.get("conversation", ""))
        else:
            self.services.engine.run(session.leave)
            session.save()
        return self.values(session)

    def refresh(self, session_id: str, memory: str) -> list[Any]:
        """Show the tab's conversation after another model was loaded."""
        session = self.services.session(session_id)
        if session is None:
            return self.arrive(memory)
        if session.request is not None:  # made during the load: the answer's own updates show the chat
            return [*self.unchanged[:-1], self.services.next_change()]
        return self.values(session)

    def choose(self, session_id: str, saved_id: str) -> list[Any]:
        """Continue a saved conversation, or start a new one."""
        return self.begin(session_id, None if saved_id == NEW else saved_id)

    def begin(self, session_id: str, saved_id: str | None = None) -> list[Any]:
        """Start a new conversation, or continue a saved one."""
        session = self._idle(session_id)
        try:
            self.services.engine.run(session.open, session.opened, saved_id)
        except UserError as error:
            raise self.services.error(error) from None
        if saved_id is not None:
            # Two tabs that write one file would lose each other's answers: the other tab saves to a copy from now on.
            for other in self.services.sessions.others_with(saved_id, session):
                other.fork()
            return self.values(session)
        return self.values(session, keep_settings=True)

    def delete(self, session_id: str) -> list[Any]:
        """Delete the tab's conversation and start a new one. An empty id means that the user did not confirm."""
        if not session_id:
            return self.unchanged
        session = self._idle(session_id)
        saved_conversations.delete(session.saved_id)
        return self.begin(session_id)

    def ask_title(self, session_id: str) -> Any:
        """Show the text field for a new title."""
        session = self._idle(session_id)
        if not saved_conversations.exists(session.saved_id):
            raise self.services.error("There is nothing to rename yet: the conversation is kept from its first answer.")
        return gr.update(visible=True, value=session.title)

    def rename(self, session_id: str, title: str) -> tuple[Any, Any]:
        """Change the conversation's title."""
        session = self._idle(session_id)
        try:
            session.title = saved_conversations.rename(session.saved_id, title)
        except UserError as error:
            raise self.services.error(error) from None
        return gr.update(visible=False, value=""), self.choices(session)

    def listed(self, session_id: str) -> Any:
        """The chooser's update after an answer, which may be the first of its conversation."""
        session = self.services.session(session_id)
        return gr.skip() if session is None else self.choices(session)

    def choices(self, session: Session) -> Any:
        """The chooser's update: all saved conversations, with this one selected."""
        is_saved = saved_conversations.exists(session.saved_id)
        titles = saved_conversations.titles()
        return gr.update(
            choices=titles if is_saved else [("New conversation", NEW), *titles],
            value=session.saved_id if is_saved else NEW,
        )

    def _idle(self, session_id: str) -> Session:
        session = self.services.need_session(session_id)
        if session.request is not None:
            raise self.services.error("The answer is still being written: wait for it, or press Esc to stop it.")
        return session

    def _recall(self, session: Session, saved_id: str) -> None:
        """Open the conversation that the tab showed before its session was lost."""
        if saved_conversations.exists(saved_id) and not self.services.sessions.others_with(saved_id, session):
            try:
                self.services.engine.run(session.open, session.opened, saved_id)
            except UserError as error:
                gr.Warning(explained(error))


def _read_memory(memory: str) -> dict[str, str]:
    try:
        values = json.loads(memory or "{}")
    except json.JSONDecodeError:
        return {}
    return {key: value for key, value in values.items() if isinstance(value, str)} if isinstance(values, dict) else {}
