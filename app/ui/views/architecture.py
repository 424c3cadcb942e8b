"""The architecture view: the model as a diagram of cards, one per tensor, with statistics of its values."""

from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

from app.ui import html
from app.ui.session.selection import Cell, Selection
from app.ui.session.session import Session
from app.ui.views.source_cards import CARDS, Card, source
from app.ui.views.tensor_statistics import LayerStatistics, Statistics, Weight, layer_weights, measure

TAB = "Architecture"
_WHAT = """
Every card is a tensor of the running model. The expression is the line of `mlx_llama3/model/transformer.py` that makes
it, read from the source with its number. The shape is the loaded model's; *B* is the batch, *T* the positions. The
weight's type is the one in memory. It may differ from the file's, because on a CPU weights are dequantized.

The figures and the histogram are those of the selected layer at the selected token: the L2 norm, the mean, the smallest
and largest number. All blocks run the same code, each with weights of its own.
"""
# CSS classes: the residual stream itself, and the updates added to it.
_CSS = {"x": "stream", "h": "stream", "y": "stream", "attn_out": "update", "mlp_out": "update"}
_NO_MODEL = "No model is loaded: choose one at the top and press Load."


def build(selection: Selection) -> None:
    """Create the view in the current tab and connect its events."""
    draw = _Draw(selection)
    with gr.Row(elem_classes="view-row"):
        head = gr.HTML(elem_id="architecture-head")
        layer = gr.Slider(0, 1, 0, step=1, label="Layer", elem_id="architecture-layer", min_width=220, visible=False)
    diagram = gr.HTML(html.empty(_NO_MODEL), elem_id="architecture-diagram")
    with gr.Accordion("What is this?", open=False):
        gr.Markdown(_WHAT)
    selection.redraw(TAB, draw.draw, [head, layer, diagram])
    layer.release(
        draw.choose,
        [selection.services.session_id, layer],
        [selection.services.generation_done],
        show_progress="hidden",
    )


@dataclass(frozen=True)
class _Draw:
    selection: Selection

    def choose(self, session_id: str, layer: int) -> Any:
        """Select another layer at the selected token, or at the last one."""
        session = self.selection.services.need_session(session_id)
        cell = self.selection.find(session_id) or _last(session)
        if cell is None:
            return gr.skip()
        session.selected = (int(layer), cell.position)
        return self.selection.services.next_change()

    def draw(self, session: Session | None, cell: Cell | None) -> list[Any]:
        if session is None:
            return ["", gr.update(visible=False), html.empty(_NO_MODEL)]
        cell = cell or _last(session)
        layer = cell.layer if cell else 0
        run = self.selection.services.engine.run
        measured = None if cell is None else run(measure, cell)
        layers = session.opened.model.args.n_layers
        return [
            _heading(cell),
            gr.update(visible=True, maximum=layers - 1, value=layer),
            _diagram(session, layer, run(layer_weights, session.opened.model, layer), measured),
        ]


def _last(session: Session) -> Cell | None:
    """The last layer at the last token; None for an empty trace."""
    layers, positions = session.trace.norms.shape[1:]
    return Cell(session, layers - 1, positions - 1) if positions else None


def _heading(cell: Cell | None) -> str:
    if cell is None:
        return "<div class='cell-head'>Nothing is measured yet: ask something.</div>"
    return f"<div class='cell-head'>Layer {cell.layer}, token {cell.position} {html.token(cell.piece, 30)}</div>"


def _diagram(session: Session, layer: int, weights: dict[str, Weight], measured: LayerStatistics | None) -> str:
    args = session.opened.model.args

    def cards(group: str) -> str:
        return "".join(_card(card, session, weights, measured) for card in CARDS if card.group == group)

    neurons = "" if measured is None else _neurons(measured)
    heads = f"{args.n_heads} heads, {args.n_kv_heads} for keys and values"
    return (
        f'<div class="model"><div class="ends">{cards("before")}</div>'
        f'<section class="block"><h3>Transformer block {layer} <small>of {args.n_layers}, independent: '
        f"the same code, weights of their own</small></h3>"
        f'<div class="branches"><div class="branch"><h4>Attention <small>{heads}</small></h4>'
        f'{cards("attention")}</div><div class="branch"><h4>SwiGLU <small>{args.hidden_dim:,} neurons</small></h4>'
        f"{cards('mlp')}{neurons}</div></div>"
        f'</section><div class="ends">{cards("after")}</div></div>'
    )


def _card(card: Card, session: Session, weights: dict[str, Weight], measured: LayerStatistics | None) -> str:
    args = session.opened.model.args
    shape = ", ".join(f"{axis:,}" if isinstance(axis, int) else axis for axis in card.shape(args))
    lines = card.find(source())
    code = "".join(
        f"<li value='{line.number}' title='{line.file}'><code>{escape(' '.join(line.text.split()))}</code></li>"
        for line in lines
    )
    places = ", ".join(dict.fromkeys(line.file for line in lines))
    weight = _weight(weights[card.weight]) if card.weight else ""
    statistics = "" if measured is None else _statistics(measured.statistics[card.name])
    return (
        f'<article class="card {_CSS.get(card.name, "")}" data-card="{card.name}" title="{places}">'
        f"<header><b>{escape(card.symbol)}</b> "
        f'<span class="shape">[{shape}]</span></header><p>{card.description}</p><ol class="code">{code}</ol>'
        f"{weight}{statistics}</article>"
    )


def _weight(weight: Weight) -> str:
    shape = " × ".join(f"{axis:,}" for axis in weight.shape)
    packed = f"; {weight.packed}" if weight.packed else ""
    return f"<p class='weight'><b>{weight.name}</b> {shape}, {escape(weight.kind)}{escape(packed)}</p>"


def _statistics(statistics: Statistics) -> str:
    names = {"norm": statistics.norm, "mean": statistics.mean, "min": statistics.low, "max": statistics.high}
    figures = "".join(
        f"<dt>{name}</dt><dd data-figure='{name}'>{html.number(value)}</dd>" for name, value in names.items()
    )
    return f"<div class='measured'><dl>{figures}</dl>{_histogram(statistics)}</div>"


def _histogram(statistics: Statistics) -> str:
    """A histogram from the smallest to the largest value; heights are square roots, so that rare values are visible."""
    height, bin_width = 30, 4
    largest = max(1, int(statistics.counts.max())) ** 0.5
    bars = []
    for i, count in enumerate(statistics.counts.tolist()):
        tall = height * count**0.5 / largest
        bars.append(f'<rect x="{i * bin_width}" y="{height - tall:.1f}" width="{bin_width - 1}" height="{tall:.1f}"/>')
    label = f"Histogram from {html.number(statistics.low)} to {html.number(statistics.high)}"
    width, low, high = bin_width * len(statistics.counts), statistics.low, statistics.high
    zero = -low / (high - low) * width if low < 0 < high else None
    line = "" if zero is None else f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{height}"/>'
    return (
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f"<title>{label}; heights are square roots of the counts</title>{''.join(bars)}{line}</svg>"
    )


def _neurons(measured: LayerStatistics) -> str:
    top = ", ".join(f"{neuron} ({value:+.2f})" for neuron, value in measured.top)
    return (
        f"<p class='view-note neurons'>{html.percent(measured.active)} of the gates are open (w1 above 0). "
        f"Strongest neurons: {top}.</p>"
    )
