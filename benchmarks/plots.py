"""How cost grows with context and with model size, drawn from what `side_by_side.py` found."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

COLOURS = {"mlx-llama3": "#d9480f", "mlx-lm": "#1971c2", "llama.cpp": "#2f9e44", "transformers": "#868e96"}


def plot(found: dict[str, Any], folder: Path) -> list[Path]:
    """`speed.png`: tokens a second over the length of the prompt and of the context, a row of pictures a model, and
    seconds a token over the size of the model."""
    figure, grid = pyplot.subplots(len(found) + 1, 2, figsize=(9, 3 * len(found) + 3), layout="constrained")
    for row, (title, model) in zip(grid, found.items(), strict=False):
        for axes, what, over in zip(row, ("prefill", "decode"), ("prompt, tokens", "context, tokens"), strict=True):
            for engine, figures in model["engines"].items():
                points = sorted((int(key.split()[1]), rate) for key, rate in figures.items() if key.startswith(what))
                axes.plot(*zip(*points, strict=True), marker="o", label=engine, color=COLOURS[engine])
            axes.set(title=f"{title}: {what}", xlabel=over, ylabel="tokens/s", xscale="log", yscale="log")
    for axes, key in zip(grid[-1], ("prefill 64", "decode 64"), strict=True):
        for engine, colour in COLOURS.items():
            sizes = [
                (m["weights"] / 1e6, 1000 / m["engines"][engine][key]) for m in found.values() if engine in m["engines"]
            ]
            if sizes:
                axes.plot(*zip(*sorted(sizes), strict=True), marker="o", label=engine, color=colour)
        axes.set(title=f"over the model's size: {key}", xlabel="weights, millions", ylabel="ms a token", yscale="log")
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    grid[0][0].legend()
    path = folder / "speed.png"
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return [path]
