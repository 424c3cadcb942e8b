"""The traces view: save the current trace, open saved ones, compare two side by side, and export them."""

import os
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from app.ui import html
from app.ui.heat_map.heat_map import DRAWN, heat_map, payload, rows_value
from app.ui.session import saved_traces
from app.ui.session.selection import Cell, Selection, call_reporting_errors
from app.ui.session.session import Session
from app.ui.views import trace_export
from mlx_llama3.errors import UserError
from mlx_llama3.trace.store import Trace

TAB = "Traces"
_WHAT = """
A trace is what the Live tab shows: the tokens and the five norms of every layer. It is kept as a *safetensors* file in
your own folder and never leaves this machine. Open one, or two beside each other: a third picture shows the **first
minus the second**, position by position, as far as both go. Where the tokens differ, both are named.

`mlx-llama3 trace --prompt … --out t.safetensors` writes the same kind of file from the command line, with full states,
logits and attention if you ask for them; *Open a file* takes it in.
"""
_CURRENT = "current"
_HEAT_MAP: dict[str, Any] = {"follow": False, "group": "traces", "height": "230px", "visible": False}
_FORMATS = ("csv", "json", "safetensors")


def build(selection: Selection) -> None:
    """Create the view in the current tab and connect its events."""
    with gr.Row(elem_classes="view-row"):
        name = gr.Textbox(
            show_label=False, label="Name", placeholder="Name of this trace", container=False, elem_id="trace-name"
        )
        save = gr.Button("Save the current trace", size="md", elem_id="trace-save", scale=0, min_width=190)
        take_in = gr.UploadButton(
            "Open a file", size="md", file_types=[".safetensors"], elem_id="trace-file", scale=0, min_width=120
        )
    with gr.Row(elem_classes="view-row"):
        first = gr.Dropdown([], value=None, label="Trace", elem_id="trace-first")
        second = gr.Dropdown([], value=None, label="Compare with", elem_id="trace-second")
    with gr.Row(elem_classes="view-row"):
        summary = gr.HTML(elem_id="trace-said")
        exports = [gr.Button(form, size="sm", scale=0, min_width=90, elem_id=f"trace-{form}") for form in _FORMATS]
        delete = gr.Button("Delete", size="sm", scale=0, min_width=70, elem_id="trace-delete")
        # A browser saves a file by a click on a link: the page's script clicks this hidden button.
        download = gr.DownloadButton(elem_id="trace-download", elem_classes="view-hidden")
    pictures = [_picture("First trace", "trace-heat-1"), _picture("Second trace", "trace-heat-2")]
    difference = heat_map(
        "First minus second",
        points=DRAWN,
        unit="difference of L2 norms",
        signed=True,
        elem_id="trace-difference",
        file="mlx-llama3-difference",
        **_HEAT_MAP,
    )
    with gr.Accordion("What is this?", open=False):
        gr.Markdown(_WHAT)

    draw, ids = _Draw(selection), selection.services.session_id
    quiet: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "multiple"}
    outputs = [*pictures, difference, summary]
    chosen = [ids, first, second]
    selection.redraw(TAB, draw.choices, [first, second], [first, second])
    save.click(draw.save, [ids, name], [first, second, name], **quiet).success(draw.show, chosen, outputs, **quiet)
    take_in.upload(draw.take_in, take_in, [first, second], **quiet).success(draw.show, chosen, outputs, **quiet)
    delete.click(draw.delete, first, [first, second], **quiet).success(draw.show, chosen, outputs, **quiet)
    for control in (first, second):
        control.input(draw.show, chosen, outputs, **quiet)
    for form, button in zip(_FORMATS, exports, strict=True):
        button.click(partial(draw.export, form), [ids, first], download, **quiet).success(
            None, None, None, js="() => document.querySelector('#trace-download').click()"
        )


def _picture(label: str, elem_id: str) -> gr.HTML:
    return heat_map(label, share=True, elem_id=elem_id, file="mlx-llama3-trace", **_HEAT_MAP)


@dataclass(frozen=True)
class _Draw:
    selection: Selection

    def choices(self, session: Session | None, _: Cell | None, first: str | None, second: str | None) -> list[Any]:
        """Update the choices. An unchanged selection is not sent: it could overwrite a newer one in the page."""
        updates = _dropdowns(first, second)
        for update, chosen in zip(updates, (first, second), strict=True):
            if update["value"] == chosen:
                del update["value"]
        return updates

    def save(self, session_id: str, name: str) -> list[Any]:
        """Save the current trace of the conversation."""
        session = self.selection.services.need_session(session_id)
        trace_id = call_reporting_errors(
            self.selection.services, saved_traces.save, session.trace, name or session.title
        )
        return [*_dropdowns(trace_id, None), ""]

    def take_in(self, file: str) -> list[Any]:
        """Save a copy of an uploaded trace file."""
        path = Path(file)
        return _dropdowns(call_reporting_errors(self.selection.services, saved_traces.take_in, path, path.stem), None)

    def delete(self, trace: str | None) -> list[Any]:
        """Delete the first trace."""
        if trace in (None, _CURRENT):
            raise self.selection.services.error("Choose a saved trace to delete.")
        call_reporting_errors(self.selection.services, saved_traces.delete, trace)
        return _dropdowns(None, None)

    def show(self, session_id: str, first: str | None, second: str | None) -> list[Any]:
        """Draw the chosen traces, and their difference if there are two."""
        return call_reporting_errors(self.selection.services, self._show, session_id, first, second)

    def _show(self, session_id: str, first: str | None, second: str | None) -> list[Any]:
        traces = [self._trace(session_id, chosen) for chosen in (first, second)]
        pictures = [_picture_update(trace) for trace in traces]
        a, b = traces
        if a is None or b is None:
            return [*pictures, gr.update(visible=False), "" if a is None else _about(a)]
        return [*pictures, gr.update(value=_difference(a, b), visible=True), _comparison(a, b)]

    def export(self, form: str, session_id: str, chosen: str | None) -> str:
        """Write the first trace to a file in the server's temporary folder; returns its path."""
        return call_reporting_errors(self.selection.services, self._export, session_id, chosen, form)

    def _export(self, session_id: str, chosen: str | None, form: str) -> str:
        trace = self._trace(session_id, chosen)
        if trace is None:
            raise UserError("Choose a trace to save a copy of.")
        folder = tempfile.mkdtemp(dir=os.environ.get("GRADIO_TEMP_DIR"))
        path = Path(folder) / f"trace.{form}"
        if form == "safetensors":
            trace.save(path)
        else:
            path.write_text({"csv": trace_export.as_csv, "json": trace_export.as_json}[form](trace), encoding="utf-8")
        return str(path)

    def _trace(self, session_id: str, chosen: str | None) -> Trace | None:
        if chosen is None:
            return None
        if chosen == _CURRENT:
            return self.selection.services.need_session(session_id).trace
        return saved_traces.open_trace(chosen)


def _dropdowns(first: str | None, second: str | None) -> list[Any]:
    names = [("Current conversation", _CURRENT), *saved_traces.listed()]
    ids = {trace_id for _, trace_id in names}
    return [
        gr.update(choices=names, value=first if first in ids else None),
        gr.update(choices=[("Nothing", None), *names], value=second if second in ids else None),
    ]


def _picture_update(trace: Trace | None) -> Any:
    return gr.update(visible=False) if trace is None else gr.update(value=payload(trace), visible=True)


def _difference(a: Trace, b: Trace) -> dict[str, Any]:
    """A heat map's value: the norms of `a` minus those of `b`, for the positions that both have."""
    if a.norms.shape[1] != b.norms.shape[1]:
        raise UserError(
            f"the traces have {a.norms.shape[1]} and {b.norms.shape[1]} layers; a difference needs the same number"
        )
    count = min(len(a.tokens), len(b.tokens))
    rows = np.stack([a.norm(name)[:, :count] - b.norm(name)[:, :count] for name, _, _ in DRAWN])  # (3, L, count)
    pieces = [x if x == y else f"{x} | {y}" for x, y in zip(a.pieces[:count], b.pieces[:count], strict=True)]
    return rows_value(rows.transpose(2, 0, 1), pieces, a.tokens[:count].tolist(), "difference")


def _about(trace: Trace) -> str:
    extra = f", {len(trace.extra)} further tensors" if trace.extra else ""
    return (
        f"<div class='view-note'>{html.token(trace.model, 40)}: {len(trace.tokens)} tokens, "
        f"{trace.norms.shape[1]} layers{extra}.</div>"
    )


def _comparison(a: Trace, b: Trace) -> str:
    count = min(len(a.tokens), len(b.tokens))
    differ = np.flatnonzero(a.tokens[:count] != b.tokens[:count])
    if not differ.size:
        return f"<div class='view-note'>The same {count} tokens in both.</div>"
    at = int(differ[0])
    return (
        f"<div class='view-note'>The tokens part at position {at}: the first has {html.token(a.pieces[at])}, "
        f"the second {html.token(b.pieces[at])}.</div>"
    )
