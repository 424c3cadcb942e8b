"""The heat map: layers by tokens on a canvas, fed with what is new. Its script and style lie beside it.

A value is a delta `{trace, model, layers, from, rows, tokens, ids}`: rows from position `from` on, base64 of
little-endian float32 `[token, point, layer]`. The canvas keeps what it was sent; if it misses something, it asks the
server for the rest. float32 and not less: what is read off the picture is what the model gave, and norms of an
attention sink can be beyond float16.
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

# What the live picture shows, in this order: name in a trace, label, title.
DRAWN = (
    ("resid_post", "Residual stream", "L2 norm of the stream after the layer"),
    ("attn_out", "Attention update", "L2 norm of what the layer's attention adds to the stream"),
    ("mlp_out", "MLP update", "L2 norm of what the layer's MLP adds to the stream"),
)
_ROWS = [POINTS.index(name) for name, _, _ in DRAWN]

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

    A function and no subclass of `gr.HTML`, for which Gradio would write a .pyi file into this folder.

    Args:
        label: for screen readers.
        points: (name, label, title) of what can be drawn; the first one first.
        row, column, unit: what a row, a column and a value are.
        signed: values around 0, colours in two directions.
        share: tell the other points' share of the first one.
        log, hide_first: how it begins; hide_first None: the first column is like all others.
        follow: keep the newest column in view until the person scrolls back.
        group: those of one group scroll and zoom together.
        height: of the picture, in CSS.
        empty: stands there as long as there are no values.
        file: the name of a picture that is saved, without its ending.
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
        css_template=f"--heat-height: {height};\n" + _beside("heat.css"),
        # In the script and not a property: an update of a component that is hidden loses all properties.
        js_on_load=f"const config = {json.dumps(config)};\n{_script()}",
        apply_default_css=False,
        server_functions=[heat_rows],
        **settings,
    )


class _Keys:
    """Traces by a name that the page may hold. A trace that nobody else keeps is forgotten."""

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


_keys = _Keys()


def payload(trace: Trace, start: int = 0) -> dict[str, Any]:
    """What a canvas that holds the first `start` positions of `trace` needs.

    May be called while another thread extends the trace: a position counts once its norms are there.
    """
    norms = trace.norms
    count = norms.shape[-1]
    start = max(0, min(start, count))
    rows = norms[_ROWS, :, start:].transpose(2, 0, 1)  # (3, L, k) -> (k, 3, L)
    return rows_value(
        rows, trace.pieces[start:count], trace.tokens[start:count].tolist(), _keys.name(trace), start, trace.model
    )


def state(trace: Trace, selected: tuple[int, int] | None) -> dict[str, Any]:
    """For a canvas in any state: how far `trace` is, so that it fetches what it lacks, and the selected cell."""
    return payload(trace, trace.norms.shape[-1]) | {"selected": selected}


def rows_value(
    rows: np.ndarray, pieces: Sequence[str], ids: Sequence[int], trace: str, start: int = 0, model: str = ""
) -> dict[str, Any]:
    """A heat map's value: `rows` `(tokens, points, layers)` from position `start` of what is named `trace`."""
    return {
        "trace": trace,
        "model": model,
        "layers": rows.shape[2],
        "from": start,
        "rows": base64.b64encode(np.ascontiguousarray(rows, "<f4").tobytes()).decode(),
        "tokens": list(pieces),
        "ids": list(ids),
    }


def heat_rows(asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """For the canvas that missed something: the rows of `trace` from `from` on; None if that trace is gone."""
    trace, start = _keys.find(asked.get("trace")), asked.get("from")
    return payload(trace, start) if trace is not None and isinstance(start, int) else None


def find_trace(name: object) -> Trace | None:
    """The trace that the page calls by this name, if it is still there."""
    return _keys.find(name)


def _script() -> str:
    """One function's body in five files."""
    parts = ("heat.js", "heat_data.js", "heat_picture.js", "heat_selecting.js", "heat_controls.js")
    return "\n".join(_beside(part) for part in parts)


def _beside(name: str) -> str:
    return files("app.ui.heat_map").joinpath(name).read_text(encoding="utf-8")


def _ramps() -> dict[str, str]:
    ramps = {"sequential": ramp(), "dark": ramp(DIVERGING_DARK), "light": ramp(DIVERGING_LIGHT)}
    return {name: base64.b64encode(colours.tobytes()).decode() for name, colours in ramps.items()}
