"""The live view: a heat map of the norms of every layer and token, and the selected cell in numbers."""

from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.ui import html
from app.ui.heat_map import heat_map
from app.ui.session.selection import Cell, Selection
from mlx_llama3.model.hooks.norms import POINTS

TAB = "Live"
_WHAT = """
Every column is a token, every row a layer, the first layer at the bottom. The **residual stream** is the vector that
carries a token through the layers; each layer adds two updates to it, one from **attention** and one from the **MLP**.
A colour is the length (L2 norm) of such a vector, measured inside the pass that made the token: no second pass is run.

The first token is an *attention sink*: heads with nothing to attend to attend to it, and its norm dwarfs all others.
It is hidden, and left out of the scale, until you ask for it. Select a cell with a click or the arrow keys; the other
tabs then look inside that layer at that token.
"""
_STEPS = {
    "resid_pre": "stream in",
    "attn_out": "+ attention",
    "resid_mid": "stream",
    "mlp_out": "+ MLP",
    "resid_post": "stream out",
}


@dataclass(frozen=True)
class LiveView:
    """heat: the heat map; it takes `heat_map.payload(trace, start)` while an answer runs."""

    heat: gr.HTML


def build(selection: Selection) -> LiveView:
    """Create the view in the current tab and connect its events."""
    services = selection.services
    picture = heat_map.heat_map(
        "Norms while the model speaks",
        share=True,
        elem_id="live-heat",
        empty="Ask something: the layers appear here, token by token.",
        file="mlx-llama3-norms",
    )
    summary = gr.HTML(_summary(None), elem_id="live-cell")
    with gr.Accordion("What is this?", open=False):
        gr.Markdown(_WHAT)
    live = _Live(selection)
    quick = {"concurrency_limit": None, "show_progress": "hidden", "trigger_mode": "multiple"}
    picture.cell(live.select, [services.session_id], [selection.cell, summary], **quick)
    services.generation_done.change(live.refresh, [services.session_id], [picture, selection.cell, summary], **quick)
    return LiveView(picture)


@dataclass(frozen=True)
class _Live:
    selection: Selection

    def select(self, session_id: str | None, event: gr.EventData) -> tuple[Any, Any]:
        """Handle a selection in the heat map, by a click or the arrow keys."""
        session = self.selection.services.session(session_id)
        # A page may still show a trace that the session no longer has.
        if session is None or heat_map.find_trace(event.trace) is not session.trace:
            return gr.skip(), gr.skip()
        layers, positions = session.trace.norms.shape[1:]
        layer, position = int(event.row), int(event.column)
        if not (0 <= layer < layers and 0 <= position < positions):
            return gr.skip(), gr.skip()
        session.selected = (layer, position)
        return self.selection.value(session_id), _summary(self.selection.find(session_id))

    def refresh(self, session_id: str | None) -> tuple[Any, Any, str]:
        """Send the canvas the trace's length, so that it fetches missing rows; drop an out-of-range selection."""
        session = self.selection.services.session(session_id)
        if session is None:
            return gr.skip(), self.selection.value(session_id), _summary(None)
        cell = self.selection.find(session_id)
        if cell is None:
            session.selected = None
        return heat_map.state(session.trace, session.selected), self.selection.value(session_id), _summary(cell)


def _summary(cell: Cell | None) -> str:
    """The selected cell: its token, and the five norms in the order of computation."""
    if cell is None:
        return html.empty("No cell is selected: click into the picture, or focus it and use the arrow keys.")
    trace = cell.session.trace
    norms = trace.norms[:, cell.layer, cell.position]
    stream = float(norms[POINTS.index("resid_post")])
    steps = []
    for name, norm in zip(POINTS, norms.tolist(), strict=True):
        share = f"<small>{html.percent(norm / stream)}</small>" if name.endswith("_out") and stream else ""
        steps.append(f"<div class='step {name}'><span>{_STEPS[name]}</span><b>{html.number(norm)}</b>{share}</div>")
    return (
        f"<div class='cell-head'>{html.token(cell.piece, 40)} token {cell.position} "
        f"<small>(id {trace.tokens[cell.position]})</small>, layer {cell.layer}</div>"
        f"<div class='cell-steps'>{''.join(steps)}</div>"
    )
