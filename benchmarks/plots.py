"""How cost grows with context and with model size, drawn from what `side_by_side.py` found."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

COLOURS = {"mlx-llama3": "#d9480f", "mlx-lm": "#1971c2", "llama.cpp": "#2f9e44", "transformers": "#868e96"}


def plot(found: dict[str, Any], folder: Path) -> list[Path]:
    """`speed.png`: tokens a second over the length of the prompt and of the context, a row of pictures a model."""
    figure, grid = pyplot.subplots(len(found), 2, figsize=(9, 3.2 * len(found)), squeeze=False, layout="constrained")
    for row, (title, engines) in zip(grid, found.items(), strict=True):
        for axes, what, over in zip(row, ("prefill", "decode"), ("prompt, tokens", "context, tokens"), strict=True):
            for engine, figures in engines.items():
                points = sorted((int(key.split()[1]), rate) for key, rate in figures.items() if key.startswith(what))
                if points:
                    axes.plot(*zip(*points, strict=True), marker="o", label=engine, color=COLOURS[engine])
            axes.set(title=f"{title}: {what}", xlabel=over, ylabel="tokens/s", xscale="log", yscale="log")
            axes.grid(alpha=0.3)
    grid[0][0].legend()
    path = folder / "speed.png"
    figure.savefig(path, dpi=110)
    return [path]
