"""What the panels and views of the UI share: the model's thread, the sessions, and the moment to redraw."""

from dataclasses import dataclass

import gradio as gr

from app.ui.session.mlx_thread import Engine
from app.ui.session.session import Session, Sessions


@dataclass(frozen=True)
class Services:
    """Made once by `layout.build` and given to every panel and view.

    engine: the one thread on which MLX may be used: `engine.run(fn, *args)` waits for the result, `engine.stream`
        iterates. It answers between two tokens of a running reply. Evaluate there and return NumPy or Python values.
    sessions: the open tabs' sessions.
    session_id: holds the tab's id; an input of every event that needs the session.
    generation_done: a counter that goes up when what the views show has changed as a whole: an answer ended, another
        conversation or model is there, or other edits. Views listen with `services.generation_done.change(...)`; an
        event that changes the edits outputs `services.next_change()` to it. Such an event must go through the queue
        (not `queue=False`): past it, Gradio does not tell the page that a State has changed.
    """

    engine: Engine
    sessions: Sessions
    session_id: gr.State
    generation_done: gr.State

    def session(self, session_id: str | None) -> Session | None:
        """The tab's session; None if it is gone (too many tabs were opened since) or no model is loaded."""
        return self.sessions.find(session_id)

    def need_session(self, session_id: str | None) -> Session:
        """As `session`; where there is none, raises the `gr.Error` that says what to do."""
        if (session := self.session(session_id)) is None:
            raise self.error("No model is loaded: choose one at the top and press Load.")
        return session

    def next_change(self) -> int:
        """A new value for `generation_done`."""
        return self.sessions.next_change()

    @staticmethod
    def error(message: object) -> gr.Error:
        """The exception to raise for a sentence where the person looks; it prints no traceback."""
        return gr.Error(str(message), title="", print_exception=False)
