"""The conversations of this machine: choose, begin, rename, delete one; and show one when the page is opened."""

import json
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.ui.panels.chat import QUICK, TELLING, ChatPanel
from app.ui.panels.settings import SettingsPanel
from app.ui.session import saved_conversations as saved
from app.ui.session.failures import explained
from app.ui.session.services import Services
from app.ui.session.session import Session
from mlx_llama3.errors import UserError

NEW = "new"


@dataclass(frozen=True)
class ConversationsPanel:
    """The components. `memory` is what this tab of the browser remembers over a reload, as JSON."""

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
    """Wire the panel's events; the page and the model chooser use what is returned."""
    made = Conversations(panel, chat, settings, services)
    tab = services.session_id
    panel.chooser.input(made.choose, [tab, panel.chooser], made.outputs, **TELLING)
    panel.new.click(made.begin, [tab], made.outputs, **TELLING)
    panel.delete.click(made.delete, [tab], made.outputs, js=_CONFIRM, **TELLING)
    panel.rename.click(made.ask_title, [tab], [panel.title], **QUICK).success(None, js=_FOCUS_TITLE)
    panel.title.submit(made.rename, [tab, panel.title], [panel.title, panel.chooser], **QUICK)
    panel.memory.change(None, [panel.memory], None, js=_REMEMBER)
    return made


_REMEMBER = "(memory) => { sessionStorage.setItem('mlx-llama3', memory); }"
RECALL = "() => sessionStorage.getItem('mlx-llama3') || ''"
_FOCUS_TITLE = "() => setTimeout(() => document.querySelector('#title textarea, #title input')?.select(), 50)"
_CONFIRM = "(tab) => confirm('Delete this conversation for good?') ? tab : ''"


@dataclass(frozen=True)
class Conversations:
    """What the events do. `outputs` is everything that belongs to a conversation; `shown` gives the values."""

    panel: ConversationsPanel
    chat: ChatPanel
    settings: SettingsPanel
    services: Services

    @property
    def outputs(self) -> list[Any]:
        """All components that show something of a conversation."""
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
        """Values for `outputs` that leave all as it is."""
        return [gr.skip()] * len(self.outputs)

    def shown(self, session: Session, *, keep_settings: bool = False) -> list[Any]:
        """Values for `outputs`; `keep_settings` leaves what stands in the settings, used or not yet."""
        settings = self.settings.shown(session.conversation)
        memory = json.dumps({"session": session.id, "conversation": session.saved_id})
        return [
            session.id,
            memory,
            self.choices(session),
            *self.chat.shown(session),
            *([gr.skip()] * len(settings) if keep_settings else settings),
            self.services.next_change(),
        ]

    def arrive(self, memory: str) -> list[Any]:
        """Show what this tab showed before, or a new conversation: the page was opened or loaded again."""
        if self.services.sessions.opened is None:
            return self.unchanged
        known = _read_memory(memory)
        session = self.services.session(known.get("session"))
        if session is None:
            session = self.services.engine.run(self.services.sessions.add)
            self._recall(session, known.get("conversation", ""))
        else:
            self.services.engine.run(session.leave)
            session.save()
        return self.shown(session)

    def refresh(self, session_id: str, memory: str) -> list[Any]:
        """Show the tab's conversation after another model was loaded."""
        session = self.services.session(session_id)
        if session is None:
            return self.arrive(memory)
        if session.asked is not None:  # asked while the model was loaded: the answer shows what there is
            return [*self.unchanged[:-1], self.services.next_change()]
        return self.shown(session)

    def choose(self, session_id: str, saved_id: str) -> list[Any]:
        """Go on with a saved conversation."""
        return self.begin(session_id, None if saved_id == NEW else saved_id)

    def begin(self, session_id: str, saved_id: str | None = None) -> list[Any]:
        """Begin a conversation, or go on with a saved one."""
        session = self._idle(session_id)
        try:
            self.services.engine.run(session.open, session.opened, saved_id)
        except UserError as error:
            raise self.services.error(error) from None
        if saved_id is not None:
            # Two tabs that write one file would lose each other's answers: the other tab's become a copy.
            for other in self.services.sessions.others_with(saved_id, session):
                other.fork()
            return self.shown(session)
        return self.shown(session, keep_settings=True)

    def delete(self, session_id: str) -> list[Any]:
        """Delete the tab's conversation for good and begin another one. No id: the person thought better of it."""
        if not session_id:
            return self.unchanged
        session = self._idle(session_id)
        saved.delete(session.saved_id)
        return self.begin(session_id)

    def ask_title(self, session_id: str) -> Any:
        """Open the line for a new title."""
        session = self._idle(session_id)
        if not saved.exists(session.saved_id):
            raise self.services.error("There is nothing to rename yet: the conversation is kept from its first answer.")
        return gr.update(visible=True, value=session.title)

    def rename(self, session_id: str, title: str) -> tuple[Any, Any]:
        """Give the conversation the title."""
        session = self._idle(session_id)
        try:
            session.title = saved.rename(session.saved_id, title)
        except UserError as error:
            raise self.services.error(error) from None
        return gr.update(visible=False, value=""), self.choices(session)

    def listed(self, session_id: str) -> Any:
        """The chooser after an answer, which may be a conversation's first."""
        session = self.services.session(session_id)
        return gr.skip() if session is None else self.choices(session)

    def choices(self, session: Session) -> Any:
        """The chooser's update: all saved conversations, this one chosen."""
        here = saved.exists(session.saved_id)
        listed = saved.titles()
        return gr.update(
            choices=listed if here else [("New conversation", NEW), *listed], value=session.saved_id if here else NEW
        )

    def _idle(self, session_id: str) -> Session:
        session = self.services.need_session(session_id)
        if session.asked is not None:
            raise self.services.error("The answer is still being written: wait for it, or press Esc to stop it.")
        return session

    def _recall(self, session: Session, saved_id: str) -> None:
        """Go on with the conversation that the tab showed before the server was started again."""
        if saved.exists(saved_id) and not self.services.sessions.others_with(saved_id, session):
            try:
                self.services.engine.run(session.open, session.opened, saved_id)
            except UserError as error:
                gr.Warning(explained(error))


def _read_memory(memory: str) -> dict[str, str]:
    try:
        known = json.loads(memory or "{}")
    except json.JSONDecodeError:
        return {}
    return {key: value for key, value in known.items() if isinstance(value, str)} if isinstance(known, dict) else {}
