"""An inspection as HTML tables: logit lens, direct logit attribution, and promoted tokens."""

from collections.abc import Iterator
from math import exp

import numpy as np

from app.ui import html
from app.ui.views.inspection import BRANCHES, Inspection
from mlx_llama3.trace.lens import AFTER

_TITLES = {"attn_out": "attention", "mlp_out": "MLP"}


def heading(inspection: Inspection, *, pinned: bool = False) -> str:
    """The heading: the cell and the target token."""
    probability = dict(inspection.candidates).get(inspection.target)
    mark = "<small>pinned</small> " if pinned else ""
    relation = "which came next" if inspection.target == inspection.chosen else "which the model is asked about"
    share = f", {html.percent(probability)} of its prediction" if probability is not None else ""
    cell = f"Layer {inspection.layer}, token {inspection.position} {html.token(inspection.piece, 30)}"
    return (
        f"<div class='cell-head'>{mark}{cell} → "
        f"{html.token(inspection.texts[inspection.target], 30)} "
        f"<small>(id {inspection.target}, {relation}{share})</small></div>"
    )


def lens(inspection: Inspection) -> str:
    """At every layer, after attention and after the MLP: the best tokens, the target's rank, and the entropy."""
    k = inspection.lens.ids.shape[2]
    groups = "".join(f'<th colspan="{k + 2}">after {"the MLP" if name == "mlp" else name}</th>' for name in AFTER)
    names = "".join(f'<th colspan="{k}">best tokens</th><th>rank</th><th>nats</th>' for _ in AFTER)
    rows = "".join(_lens_row(inspection, layer) for layer in reversed(range(inspection.lens.ids.shape[0])))
    return (
        '<div class="view-scroll lens" tabindex="0" role="region" aria-label="Logit lens">'
        '<table class="view-table" aria-label="Logit lens">'
        f'<thead><tr><th rowspan="2">layer</th>{groups}</tr><tr class="second">{names}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _lens_row(inspection: Inspection, layer: int) -> str:
    data, cells = inspection.lens, []
    for after, name in enumerate(AFTER):
        for token, logprob in zip(data.ids[layer, after].tolist(), data.logprobs[layer, after].tolist(), strict=True):
            text, probability = inspection.texts[token], exp(logprob)
            content = html.token(text, 11)
            if token == inspection.target:
                content = f"<b>{content}</b>"
            cells.append(html.shaded(content, probability, f"{text!r}: {html.percent(probability)}"))
        rank = int(data.rank[layer, after]) + 1
        place = f"the asked token is at place {rank} with {html.percent(exp(data.target_logprob[layer, after]))}"
        cells.append(html.shaded(f"{rank:,}", 1 / rank, f"after {name} {place}"))
        cells.append(f'<td class="figure">{data.entropy[layer, after]:.2f}</td>')
    chosen = " class='chosen'" if layer == inspection.layer else ""
    return f"<tr{chosen} data-layer='{layer}'><th>{layer}</th>{''.join(cells)}</tr>"


def attribution(inspection: Inspection) -> str:
    """The contributions of the embedding, every attention and every MLP to the target's logit."""
    parts = inspection.attribution
    largest = float(max(abs(parts.embedding), np.abs(parts.attention).max(), np.abs(parts.mlp).max()))

    def part(value: float) -> tuple[str, str]:
        return (
            f'<td class="wide">{html.bar_cell(value, largest, signed=True)}</td>',
            f'<td class="figure">{value:+.2f}</td>',
        )

    rows = []
    for layer in reversed(range(len(parts.mlp))):
        chosen = " class='chosen'" if layer == inspection.layer else ""
        cells = "".join((*part(float(parts.attention[layer])), *part(float(parts.mlp[layer]))))
        rows.append(f"<tr{chosen} data-layer='{layer}'><th>{layer}</th>{cells}</tr>")
    rows.append(f"<tr><th>emb.</th>{''.join(part(parts.embedding))}<td></td><td></td></tr>")
    head = '<th>layer</th><th colspan="2">attention</th><th colspan="2">MLP</th>'
    return (
        '<div class="view-scroll" tabindex="0" role="region" aria-label="Direct logit attribution">'
        '<table class="view-table attribution" aria-label="Direct logit attribution">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f"<p class='view-note'>Together they are the logit, {parts.logit:.2f}.</p>"
    )


def promoted(inspection: Inspection) -> str:
    """The tokens that the selected layer's two updates promote and suppress most."""
    columns = [column for branch in BRANCHES for column in _promoted_and_suppressed(inspection, branch)]
    head = [f"{_TITLES[branch]} {verb}" for branch in BRANCHES for verb in ("promotes", "suppresses")]
    largest = max(abs(value) for column in columns for _, value in column)
    rows = []
    for entries in zip(*columns, strict=True):
        cells = []
        for token, value in entries:
            shade = "plus" if value > 0 else "minus"
            strength = round(60 * abs(value) / largest) if largest else 0
            cells.append(
                f'<td style="background: color-mix(in oklab, var(--view-{shade}) {strength}%, transparent)">'
                f"{html.token(inspection.texts[token])} <small>{value:+.2f}</small></td>"
            )
        rows.append(cells)
    return f'<div class="view-scroll">{html.table(head, rows, css="promoted", label="Promoted tokens")}</div>'


def _promoted_and_suppressed(inspection: Inspection, branch: str) -> Iterator[list[tuple[int, float]]]:
    ids, values = inspection.promoted[branch]
    pairs = list(zip(ids.tolist(), values.tolist(), strict=True))
    yield pairs[: len(pairs) // 2]
    yield pairs[len(pairs) // 2 :]
