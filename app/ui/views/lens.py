"""The lens view: the logit lens, the attention of every head, and the direct logit attribution of one cell."""

from dataclasses import dataclass
from typing import Any

import gradio as gr
import numpy as np

from app.ui import html
from app.ui.heat_map.heat_map import heat_map, rows_value
from app.ui.session.selection import Cell, Selection, call_reporting_errors
from app.ui.session.session import Session
from app.ui.views import lens_tables
from app.ui.views.inspection import Inspection, inspect

TAB = "Lens & attention"
_WHAT = """
**Logit lens** (nostalgebraist 2020): the stream at each layer, put through the final norm and the head, as if the model
stopped there. Stronger colour is more probable; *rank* is the place of the token that is asked about, *nats* the
entropy. At the last layer it is the model's own prediction.

**Attention**: how much of each head's attention at this token goes to each earlier one. It is recomputed as softmax(QK)
from the cache, because the fused kernel gives no weights. Many heads rest on the first token; it is hidden until you
ask for it.

**Attribution** (direct logit attribution, Elhage et al. 2021): the logit is a sum over the embedding and all updates,
with the final norm's scale held constant. It shows direct effects only, not what a layer did through later ones.
**Promoted** is the same for the selected layer's updates, over all tokens.
"""
_PICK = "Select a cell in the Live tab: this looks into that layer at that token."


@dataclass(frozen=True)
class _Panel:
    """The components of an inspection and of the pinned one."""

    head: gr.HTML
    target: gr.Dropdown
    pin: gr.Button
    lens: gr.HTML
    attribution: gr.HTML
    promoted: gr.HTML
    by_head: gr.Checkbox
    heads: gr.HTML
    attention: gr.HTML
    pinned_attention: gr.HTML

    @property
    def all(self) -> list[Any]:
        """All components, in the order of `_Draw`'s values."""
        return [getattr(self, name) for name in self.__dataclass_fields__]


def build(selection: Selection) -> None:
    """Create the view in the current tab and connect its events."""
    panel, pinned = _components(), gr.State(None)
    with gr.Accordion("What is this?", open=False):
        gr.Markdown(_WHAT)
    draw, ids = _Draw(selection), selection.services.session_id
    selection.redraw(TAB, draw.cell, panel.all, [pinned, panel.by_head])
    quiet = {"show_progress": "hidden", "trigger_mode": "multiple"}
    inputs = [ids, panel.target, pinned, panel.by_head]
    for control in (panel.target, panel.by_head):
        control.input(draw.target, inputs, panel.all, **quiet)
    panel.pin.click(draw.pin, [ids, panel.target, pinned], [pinned], **quiet).success(
        draw.target, inputs, panel.all, **quiet
    )


def _components() -> _Panel:
    hidden: dict[str, Any] = {"visible": False}
    with gr.Row(elem_classes="view-row"):
        head = gr.HTML(html.empty(_PICK), elem_id="lens-head")
        target = gr.Dropdown(label="Next token asked about", elem_id="lens-target", min_width=280, scale=0, **hidden)
        pin = gr.Button("Pin", size="sm", elem_id="lens-pin", min_width=70, scale=0, **hidden)
    with gr.Tabs(elem_id="lens-parts"):
        with gr.Tab("Logit lens"):
            lens = gr.HTML(elem_id="lens-table")
        with gr.Tab("Attribution"):
            by_head = gr.Checkbox(False, label="by head", elem_id="lens-by-head", container=False, **hidden)
            attribution = gr.HTML(elem_id="lens-attribution")
            heads = heat_map(
                "Direct logit attribution by head",
                points=(("attribution", "Heads", "What each head adds to the logit"),),
                column="head",
                unit="added to the logit",
                signed=True,
                hide_first=None,
                follow=False,
                height="380px",
                elem_id="heads-heat",
                file="mlx-llama3-heads",
                **hidden,
            )
        with gr.Tab("Promoted"):
            promoted = gr.HTML(elem_id="lens-promoted")
    attention, pinned_attention = (_attention_heat(name) for name in ("attention-heat", "pinned-attention-heat"))
    return _Panel(head, target, pin, lens, attribution, promoted, by_head, heads, attention, pinned_attention)


def _attention_heat(elem_id: str) -> gr.HTML:
    return heat_map(
        "Attention of every head",
        points=(("attention", "Attention", "Share of the head's attention"),),
        row="head",
        column="key",
        unit="of each head's attention",
        log=False,
        height="210px",
        visible=False,
        elem_id=elem_id,
        file="mlx-llama3-attention",
    )


@dataclass(frozen=True)
class _Draw:
    """The event handlers. They return values for `_Panel.all`."""

    selection: Selection

    def cell(self, _: Session | None, cell: Cell | None, pinned: Inspection | None, by_head: bool) -> list[Any]:
        """Show the selected cell with its actual next token as the target."""
        return self._show(cell, None, pinned, by_head)

    def target(self, session_id: str, target: int | None, pinned: Inspection | None, by_head: bool) -> list[Any]:
        """Show the selected cell with another target."""
        return call_reporting_errors(
            self.selection.services, self._show, self.selection.find(session_id), target, pinned, by_head
        )

    def pin(self, session_id: str, target: int | None, pinned: Inspection | None) -> Inspection | None:
        """Pin the current inspection beside later ones, or unpin it."""
        cell = self.selection.find(session_id)
        if pinned is not None or cell is None:
            return None
        return call_reporting_errors(self.selection.services, self.selection.services.engine.run, inspect, cell, target)

    def _show(self, cell: Cell | None, target: int | None, pinned: Inspection | None, by_head: bool) -> list[Any]:
        if cell is None:
            hidden = gr.update(visible=False)
            return [html.empty(_PICK), hidden, hidden, "", "", "", hidden, hidden, hidden, hidden]
        inspection = self.selection.services.engine.run(inspect, cell, target)
        both = [inspection] if pinned is None else [inspection, pinned]
        attribution = "" if by_head else _side_by_side(both, lens_tables.attribution)
        return [
            "".join(lens_tables.heading(each, pinned=each is pinned) for each in both),
            gr.update(choices=_choices(inspection), value=inspection.target, visible=True),
            gr.update(value="Pin" if pinned is None else "Unpin", visible=True),
            _side_by_side(both, lens_tables.lens),
            attribution,
            _side_by_side(both, lens_tables.promoted),
            gr.update(visible=True),
            gr.update(value=_heads_value(inspection), visible=True) if by_head else gr.update(visible=False),
            gr.update(value=_attention_value(inspection, "attention"), visible=True),
            gr.update(visible=False)
            if pinned is None
            else gr.update(value=_attention_value(pinned, "pinned attention"), visible=True),
        ]


def _side_by_side(inspections: list[Inspection], draw: Any) -> str:
    return f'<div class="view-pair">{"".join(f"<div>{draw(each)}</div>" for each in inspections)}</div>'


def _choices(inspection: Inspection) -> list[tuple[str, int]]:
    """The possible targets: the actual next token, then the model's most probable ones."""
    shares, chosen = dict(inspection.candidates), inspection.chosen
    ids = dict.fromkeys([*([] if chosen is None else [chosen]), *shares, inspection.target])
    names = []
    for token in ids:
        share = html.percent(shares[token]) if token in shares else "below the best"
        came = ", came next" if token == chosen else ""
        names.append((f"{inspection.texts.get(token, token)!r} ({share}{came})", token))
    return names


def _attention_value(inspection: Inspection, name: str) -> dict[str, Any]:
    rows = inspection.attention.T[:, None]  # (n_heads, T) -> (T, 1, n_heads)
    title = f"layer {inspection.layer}, token {inspection.position}"
    return rows_value(rows, inspection.pieces, range(len(inspection.pieces)), name, model=title)


def _heads_value(inspection: Inspection) -> dict[str, Any]:
    heads = inspection.attribution.heads  # (n_layers, n_heads)
    names = [f"head {head}" for head in range(heads.shape[1])]
    return rows_value(np.ascontiguousarray(heads.T[:, None]), names, range(len(names)), "heads")
