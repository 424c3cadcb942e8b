"""The selected cell and the open tab, which all views share, and the redrawing of a view when they change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.ui.session.failures import explained
from app.ui.session.services import Services
from app.ui.session.session import Session


@dataclass(frozen=True)
class Cell:
    """A layer and a position, both within a session's trace."""

    session: Session
    layer: int
    position: int

    @property
    def piece(self) -> str:
        """The text of the position's token."""
        return self.session.trace.pieces[self.position]


@dataclass(frozen=True)
class Selection:
    """The state that all views share.

    cell: holds `value`; only the live view sets it. tab: the name of the open tab, the only one that is redrawn.

    The selected cell is stored in the session. An event that changes it, or anything else that the views show, outputs
    `services.next_change()` to `services.generation_done`; then the live view sets `cell` to a new value.
    """

    services: Services
    cell: gr.State
    tab: gr.State

    def find(self, session_id: str | None) -> Cell | None:
        """The selected cell of the tab's session, if it is still in the trace."""
        session = self.services.session(session_id)
        if session is None or session.selected is None:
            return None
        layer, position = session.selected
        if position >= session.trace.norms.shape[-1]:
            return None
        return Cell(session, layer, position)

    def value(self, session_id: str | None) -> list[int | None]:
        """The new value for `cell`: layer, position, and a unique number, so that every value is a change."""
        cell = self.find(session_id)
        return [cell and cell.layer, cell and cell.position, self.services.next_change()]

    def redraw(
        self,
        tab: str,
        draw: Callable[..., Any],
        outputs: Sequence[Any],
        inputs: Sequence[Any] = (),
    ) -> None:
        """While `tab` is open, set `outputs` to `draw(session or None, cell or None, *inputs)` after every change."""

        def draw_if_open(open_tab: str, session_id: str | None, *rest: Any) -> Any:
            if open_tab != tab:
                return gr.skip()
            session, cell = self.services.session(session_id), self.find(session_id)
            return call_reporting_errors(self.services, draw, session, cell, *rest)

        gr.on(
            [self.cell.change, self.tab.change],
            draw_if_open,
            [self.tab, self.services.session_id, *inputs],
            list(outputs),
            show_progress="hidden",
            trigger_mode="multiple",
        )


def call_reporting_errors(services: Services, fn: Callable[..., Any], *args: Any) -> Any:
    """Return `fn(*args)`; any error is raised as a `gr.Error` with a sentence for the page."""
    try:
        return fn(*args)
    except gr.Error:
        raise
    except Exception as error:  # `explained` also logs it
        raise services.error(explained(error)) from None
