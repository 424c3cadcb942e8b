"""Plots the results of `side_by_side.py`: speed over context length and over model size."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

COLOURS = {"mlx-llama3": "#d9480f", "mlx-lm": "#1971c2", "llama.cpp": "#2f9e44", "transformers": "#868e96"}


def plot(results: dict[str, Any], folder: Path) -> list[Path]:
    """Draw `speed.png`: for each model, tokens per second over prompt and context length; below, milliseconds per token
    over model size."""
    figure, grid = pyplot.subplots(len(results) + 1, 2, figsize=(9, 3 * len(results) + 3), layout="constrained")
    for row, (title, model) in zip(grid, results.items(), strict=False):
        for axes, what, over in zip(row, ("prefill", "decode"), ("prompt, tokens", "context, tokens"), strict=True):
            for engine, figures in model["engines"].items():
                points = sorted((int(key.split()[1]), rate) for key, rate in figures.items() if key.startswith(what))
                axes.plot(*zip(*points, strict=True), marker="o", label=engine, color=COLOURS[engine])
            axes.set(title=f"{title}: {what}", xlabel=over, ylabel="tokens/s", xscale="log", yscale="log")
    for axes, key in zip(grid[-1], ("prefill 64", "decode 64"), strict=True):
        for engine, colour in COLOURS.items():
            sizes = [
                (m["weights"] / 1e6, 1000 / m["engines"][engine][key])
                for m in results.values()
                if engine in m["engines"]
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
