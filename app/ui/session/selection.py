"""The selected cell and the open tab, which all views share, and how a view keeps up with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.ui.session.failures import explained
from app.ui.session.services import Services
from app.ui.session.session import Session


@dataclass(frozen=True)
class Cell:
    """A layer at a position of a session's trace, both of which are there."""

    session: Session
    layer: int
    position: int

    @property
    def piece(self) -> str:
        """The text of the position's token."""
        return self.session.trace.pieces[self.position]


@dataclass(frozen=True)
class Selection:
    """cell: holds `value`, which the live view alone gives out. tab: the name of the open tab, whose view is computed.

    The selected cell itself is the session's. An event that changes it, or anything else that the views show, outputs
    `services.next_change()` to `services.generation_done`; then the live view gives `cell` a new value.
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
        """What `cell` is to hold now: layer, position, and a number that is another one each time."""
        cell = self.find(session_id)
        return [cell and cell.layer, cell and cell.position, self.services.next_change()]

    def redraw(
        self,
        tab: str,
        draw: Callable[..., Any],
        outputs: Sequence[Any],
        inputs: Sequence[Any] = (),
    ) -> None:
        """Keep `outputs` at `draw(session or None, cell or None, *inputs)` while `tab` is open, whatever changes."""

        def maybe(open_tab: str, session_id: str | None, *rest: Any) -> Any:
            if open_tab != tab:
                return gr.skip()
            return told(self.services, draw, self.services.session(session_id), self.find(session_id), *rest)

        gr.on(
            [self.cell.change, self.tab.change],
            maybe,
            [self.tab, self.services.session_id, *inputs],
            list(outputs),
            show_progress="hidden",
            trigger_mode="multiple",
        )


def told(services: Services, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`; whatever fails is raised as a sentence for the page."""
    try:
        return fn(*args)
    except gr.Error:
        raise
    except Exception as error:  # `explained` tells it and logs it; the page goes on
        raise services.error(explained(error)) from None
