"""Exports a trace as CSV or JSON, for other programs."""

import csv
import json
from io import StringIO

from mlx_llama3.model.hooks.norms import POINTS
from mlx_llama3.trace.store import Trace


def as_csv(trace: Trace) -> str:
    """The trace as CSV, one line per token and layer: position, id, token, layer, and the five norms."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["position", "id", "token", "layer", *POINTS])
    layers, positions = trace.norms.shape[1:]
    for position in range(positions):
        token, piece = int(trace.tokens[position]), _escape_formula(trace.pieces[position])
        for layer in range(layers):
            writer.writerow([position, token, piece, layer, *map(str, trace.norms[:, layer, position])])
    return text.getvalue()


def as_json(trace: Trace) -> str:
    """The trace as a JSON object; `norms` has one list per layer for each of the five points."""
    return json.dumps(
        {
            "model": trace.model,
            "settings": trace.settings,
            "tokens": [
                {"id": int(token), "text": piece} for token, piece in zip(trace.tokens, trace.pieces, strict=True)
            ],
            "norms": {point: trace.norm(point).tolist() for point in POINTS},
        },
        ensure_ascii=False,
    )


def _escape_formula(piece: str) -> str:
    """Prefix an apostrophe to a token that a spreadsheet would read as a formula."""
    return f"'{piece}" if piece.startswith(("=", "+", "-", "@", "\t", "\r")) else piece
