"""Shows a trace on the terminal: a heat map of layers by tokens, and a table of norms by layer."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from app.colours import terminal_ramp
from app.console import VISIBLE
from mlx_llama3.errors import UserError
from mlx_llama3.trace.store import Trace, load_trace

RESET = "\x1b[0m"
SHADES = " .:-=+*#%@"
LABEL = 5  # characters of the layer axis
TICK = 10  # characters between two labels of the token axis
MEASURED = ("attn_out", "mlp_out", "resid_post")


def show(path: Path, point: str, tokens: slice) -> None:
    """Print the trace in `path`: a heat map of the norms at `point`, then a table of mean norms.

    With colour, a line of half blocks shows two layers; without, a line of characters shows one.
    Raises `UserError` if the file is not a trace or `tokens` selects no position.
    """
    trace = load_trace(path)
    positions = range(len(trace.tokens))[tokens]
    if not positions:
        raise UserError(f"{path} holds positions 0 to {len(trace.tokens) - 1}; --tokens asks for none of them")
    width = max(20, shutil.get_terminal_size().columns - LABEL - 1)
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for line in (*_heading(trace), "", *_picture(trace, point, positions, width, coloured), "", *_table(trace)):
        print(line.rstrip() if not coloured else line)


def _heading(trace: Trace) -> Iterator[str]:
    settings = ", ".join(f"{key} {value}" for key, value in trace.settings.items() if value not in (None, [], {}))
    layers = trace.norms.shape[1]
    yield _printable(f"{trace.model}: {len(trace.tokens)} tokens, {layers} layers; {settings}")
    for name, tensor in trace.extra.items():
        if not name.startswith("attention/") or name == "attention/0":
            many = f" … attention/{layers - 1}" if name == "attention/0" else ""
            yield _printable(f"also holds {name}{many} {tensor.shape}")


def _picture(trace: Trace, point: str, positions: range, width: int, coloured: bool) -> Iterator[str]:
    values = trace.norm(point)[:, positions.start : positions.stop]
    per_column = -(-len(positions) // width)  # tokens
    starts = np.arange(0, len(positions), per_column)
    values = np.maximum.reduceat(values, starts, axis=1)  # (L, columns)
    level, low, high = _levels(values, has_first=positions.start == 0)
    yield f"{point}, L2 norm, logarithmic from {low:.3g} to {high:.3g}; layer 0 at the bottom" + (
        f"; a column is the largest of {per_column} tokens" if per_column > 1 else ""
    )
    if positions.start == 0:
        yield "the first token, an attention sink, does not count for the scale"
    yield from _half_blocks(level) if coloured else _shades(level)
    marks = (f"{positions.start + start * per_column:<{TICK}}" for start in range(0, len(starts), TICK))
    yield " " * LABEL + "".join(marks)


def _levels(values: np.ndarray, *, has_first: bool) -> tuple[np.ndarray, float, float]:
    """(levels, low, high): levels from 0 to 1 on a logarithmic scale from low to high, NaN where a norm is 0."""
    counted = values[:, 1:] if has_first and values.shape[1] > 1 else values
    counted = counted[counted > 0]
    if not counted.size:
        return np.full(values.shape, np.nan), 0.0, 0.0
    low, high = float(counted.min()), float(counted.max())
    with np.errstate(divide="ignore"):
        level = (np.log(values) - np.log(low)) / max(np.log(high / low), 1e-9)
    return np.where(values > 0, np.clip(level, 0, 1), np.nan), low, high


def _half_blocks(level: np.ndarray) -> Iterator[str]:
    ramp = terminal_ramp()
    index = np.nan_to_num(np.round(level * (len(ramp) - 1)), nan=-1).astype(int)

    def colour(ground: int, at: int) -> str:
        return f"\x1b[{ground};5;{ramp[at]}m" if at >= 0 else f"\x1b[{ground + 1}m"

    for top in range(level.shape[0] - 1, -1, -2):
        upper, lower = index[top], index[top - 1] if top else np.full(level.shape[1], -1)
        cells = "".join(colour(38, int(a)) + colour(48, int(b)) + "▀" for a, b in zip(upper, lower, strict=True))
        yield f"{top:>{LABEL - 1}} {cells}{RESET}"


def _shades(level: np.ndarray) -> Iterator[str]:
    index = np.nan_to_num(np.ceil(level * (len(SHADES) - 2)) + 1, nan=0).astype(int).clip(0, len(SHADES) - 1)
    for layer in range(level.shape[0] - 1, -1, -1):
        yield f"{layer:>{LABEL - 1}} " + "".join(SHADES[i] for i in index[layer])


def _table(trace: Trace) -> Iterator[str]:
    """Mean norms by layer without the first token, and the token with the largest residual stream."""
    first = 1 if len(trace.tokens) > 1 else 0
    yield "layer" + "".join(f"{name:>12}" for name in MEASURED) + "  largest at   (means over all but the first token)"
    means = [trace.norm(name)[:, first:].mean(axis=1) for name in MEASURED]
    stream = trace.norm("resid_post")[:, first:]
    for layer in range(trace.norms.shape[1]):
        at = first + int(stream[layer].argmax())
        numbers = "".join(f"{mean[layer]:>12.2f}" for mean in means)
        yield f"{layer:>5}{numbers}  {at} {_printable(repr(str(trace.pieces[at])))}"


def _printable(text: str) -> str:
    return text.translate(VISIBLE).replace("\n", "␊").replace("\t", "␉")
