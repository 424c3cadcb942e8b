"""The heat map: layers by tokens on a canvas that receives only new rows. Its scripts and style are in this folder.

A value is a delta `{trace, model, layers, from, rows, tokens, ids}`: rows from position `from` on, base64 of
little-endian float32 `[token, point, layer]`. The canvas stores all rows; it requests missing ones from the server.
The values are float32 because the norms of an attention sink can exceed float16, and because a tooltip shows the
model's exact value.
"""

import base64
import json
import secrets
import weakref
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import gradio as gr
import numpy as np

from app.colours import DIVERGING_DARK, DIVERGING_LIGHT, ramp
from mlx_llama3.model.hooks.norms import POINTS
from mlx_llama3.trace.store import Trace

# The points that the heat map can draw, in this order: name in a trace, label, title.
DRAWN = (
    ("resid_post", "Residual stream", "L2 norm of the stream after the layer"),
    ("attn_out", "Attention update", "L2 norm of what the layer's attention adds to the stream"),
    ("mlp_out", "MLP update", "L2 norm of what the layer's MLP adds to the stream"),
)
_POINT_ROWS = [POINTS.index(name) for name, _, _ in DRAWN]

_TEMPLATE = """
<div class="heat-bar"></div>
<div class="heat-frame">
  <div class="heat-scroll" tabindex="0" role="application" aria-roledescription="heat map">
    <div class="heat-spacer"><canvas class="heat-canvas"></canvas></div>
  </div>
  <div class="heat-empty"></div>
  <button class="heat-newest" type="button" hidden>newest ⇥</button>
  <div class="heat-tip" hidden></div>
  <div class="heat-live" aria-live="polite"></div>
</div>
<div class="heat-legend">
  <span class="heat-low"></span><span class="heat-ramp"></span><span class="heat-high"></span>
  <span class="heat-unit"></span>
</div>
"""


def heat_map(
    label: str,
    *,
    points: Sequence[tuple[str, str, str]] = DRAWN,
    row: str = "layer",
    column: str = "token",
    unit: str = "L2 norm",
    signed: bool = False,
    share: bool = False,
    log: bool = True,
    hide_first: bool | None = True,
    follow: bool = True,
    group: str = "",
    height: str = "clamp(300px, 100dvh - 410px, 900px)",
    empty: str = "",
    file: str = "heat",
    **settings: Any,
) -> gr.HTML:
    """A heat map. `heat_map(...).cell(fn, ...)` listens to selections: `gr.EventData` with trace, row and column.

    This is a function, because Gradio writes a .pyi file into the folder of a subclass of `gr.HTML`.

    Args:
        label: for screen readers.
        points: (name, label, title) of the quantities that can be drawn; the first one is drawn at first.
        row, column, unit: the names of a row, a column and a value's unit.
        signed: the values have both signs; the colour scale is diverging.
        share: the tooltip shows the other points as a share of the first one.
        log, hide_first: the initial switches; hide_first None: no switch, the first column is like all others.
        follow: scroll to the newest column until the user scrolls back.
        group: heat maps of one group scroll and zoom together.
        height: the picture's height, in CSS.
        empty: the text while there are no values.
        file: the name of a saved picture, without its extension.
        **settings: of `gr.HTML`.
    """
    config = {
        "label": label,
        "points": [{"name": name, "label": text, "title": title} for name, text, title in points],
        "row": row,
        "column": column,
        "unit": unit,
        "signed": signed,
        "share": share,
        "log": log,
        "hideFirst": hide_first,
        "follow": follow,
        "group": group,
        "empty": empty,
        "file": file,
        "ramps": _ramps(),
    }
    return gr.HTML(
        html_template=_TEMPLATE,
        css_template=f"--heat-height: {height};\n" + _read("heat.css"),
        # The config is in the script, not a property: an update of a hidden component loses all properties.
        js_on_load=f"const config = {json.dumps(config)};\n{_script()}",
        apply_default_css=False,
        server_functions=[heat_rows],
        **settings,
    )


class _TraceNames:
    """Random names for traces, by which the page refers to them. It holds weak references only."""

    def __init__(self) -> None:
        self._traces: weakref.WeakValueDictionary[str, Trace] = weakref.WeakValueDictionary()
        self._names: dict[int, str] = {}

    def name(self, trace: Trace) -> str:
        if id(trace) not in self._names:
            name = self._names[id(trace)] = secrets.token_urlsafe(9)
            self._traces[name] = trace
            weakref.finalize(trace, self._names.pop, id(trace), None)
        return self._names[id(trace)]

    def find(self, name: object) -> Trace | None:
        return self._traces.get(name) if isinstance(name, str) else None


_trace_names = _TraceNames()


def payload(trace: Trace, start: int = 0) -> dict[str, Any]:
    """The value for a canvas that has the first `start` positions of `trace`: the rows from there on.

    Another thread may extend the trace meanwhile: a position is complete once its norms are there.
    """
    norms = trace.norms
    count = norms.shape[-1]
    start = max(0, min(start, count))
    rows = norms[_POINT_ROWS, :, start:].transpose(2, 0, 1)  # (3, L, k) -> (k, 3, L)
    return rows_value(
        rows,
        trace.pieces[start:count],
        trace.tokens[start:count].tolist(),
        _trace_names.name(trace),
        start,
        trace.model,
    )


def state(trace: Trace, selected: tuple[int, int] | None) -> dict[str, Any]:
    """A value without rows: the length of `trace`, so that the canvas fetches missing rows, and the selected cell."""
    return payload(trace, trace.norms.shape[-1]) | {"selected": selected}


def rows_value(
    rows: np.ndarray, pieces: Sequence[str], ids: Sequence[int], trace: str, start: int = 0, model: str = ""
) -> dict[str, Any]:
    """A heat map's value: `rows` `(tokens, points, layers)` from position `start` on; trace: its name."""
    return {
        "trace": trace,
        "model": model,
        "layers": rows.shape[2],
        "from": start,
        "rows": base64.b64encode(np.ascontiguousarray(rows, "<f4").tobytes()).decode(),
        "tokens": list(pieces),
        "ids": list(ids),
    }


def heat_rows(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Answer a canvas that misses rows: those of `trace` from `from` on; None if the trace no longer exists."""
    trace, start = _trace_names.find(request.get("trace")), request.get("from")
    return payload(trace, start) if trace is not None and isinstance(start, int) else None


def find_trace(name: object) -> Trace | None:
    """The trace with this name in the page; None if it no longer exists."""
    return _trace_names.find(name)


def _script() -> str:
    """The script: the body of one function, in five files."""
    parts = ("heat.js", "heat_data.js", "heat_picture.js", "heat_selecting.js", "heat_controls.js")
    return "\n".join(_read(part) for part in parts)


def _read(name: str) -> str:
    return files("app.ui.heat_map").joinpath(name).read_text(encoding="utf-8")


def _ramps() -> dict[str, str]:
    ramps = {"sequential": ramp(), "dark": ramp(DIVERGING_DARK), "light": ramp(DIVERGING_LIGHT)}
    return {name: base64.b64encode(colours.tobytes()).decode() for name, colours in ramps.items()}
