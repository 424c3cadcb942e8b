"""What the panels and views of the UI share: the MLX thread, the sessions, and the signal to redraw."""

from dataclasses import dataclass

import gradio as gr

from app.ui.session.mlx_thread import Engine
from app.ui.session.session import Session, Sessions


@dataclass(frozen=True)
class Services:
    """The shared services; `layout.build` creates them and passes them to every panel and view.

    engine: the one thread that may use MLX: `engine.run(fn, *args)` waits for the result, `engine.stream` iterates. It
        runs calls between two tokens of an answer. Evaluate arrays there, and return NumPy or Python values.
    sessions: the sessions of the open tabs.
    session_id: holds the tab's id; an input of every event that needs the session.
    generation_done: a counter that increases when the views must be redrawn: after an answer, and after a change of the
        conversation, the model or the edits. Views listen with `services.generation_done.change(...)`; an event that
        changes the edits outputs `services.next_change()` to it. Such an event must be queued (not `queue=False`):
        otherwise Gradio does not tell the page that a State has changed.
    """

    engine: Engine
    sessions: Sessions
    session_id: gr.State
    generation_done: gr.State

    def session(self, session_id: str | None) -> Session | None:
        """The tab's session; None if it was dropped (too many tabs were opened since) or no model is loaded."""
        return self.sessions.find(session_id)

    def need_session(self, session_id: str | None) -> Session:
        """Like `session`, but raises a `gr.Error` with a hint if there is none."""
        if (session := self.session(session_id)) is None:
            raise self.error("No model is loaded: choose one at the top and press Load.")
        return session

    def next_change(self) -> int:
        """A new value for `generation_done`."""
        return self.sessions.next_change()

    @staticmethod
    def error(message: object) -> gr.Error:
        """The exception that shows `message` in the page; it prints no traceback."""
        return gr.Error(str(message), title="", print_exception=False)
