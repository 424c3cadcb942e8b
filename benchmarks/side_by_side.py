"""Compares this project with mlx-lm, llama.cpp and transformers, on the same weights and machine in one run.

    python benchmarks/side_by_side.py [--rounds 3] [--layers 2 6] [--quick] [--json FILE] [--plot FOLDER]

The models are the demo model (4 bits per weight on disk), and random weights in 1B's widths with some numbers of
layers. Each engine is measured in its own processes. The engines alternate, in reversed order in every other round, and
medians and their ratios are printed. An engine that is not installed is skipped with a message.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import bench_models  # noqa: E402
from engines import NO_TILES  # noqa: E402

PACKAGES = {"mlx-llama3": "mlx", "mlx-lm": "mlx_lm", "llama.cpp": "llama_cpp", "transformers": "torch"}
US = "mlx-llama3"
PREFILL, DECODE, TOKENS = (64, 512, 2048), (64, 1024, 4096), 16
# An engine that takes minutes for longer prompts (mlx-lm on a CPU) measures them in the first round only.
SLOW = {"mlx-lm": 64}


def main() -> None:
    options = _options()
    engines = [engine for engine, package in PACKAGES.items() if find_spec(package)]
    for engine in PACKAGES.keys() - set(engines):
        print(f"{engine} is not installed and left out", file=sys.stderr)
    models = {"demo model, 135M": bench_models.demo()}
    for layers in options.layers:
        models[f"1B's widths, {layers} layers"] = bench_models.random_1b(layers)
    results: dict[str, Any] = {}
    for title, forms in models.items():
        readings = rounds(forms, engines, options.rounds, options.quick)
        results[title] = {"weights": bench_models.n_weights(forms), "engines": summary(readings)}
        print("\n".join(table(title, results[title]["engines"])), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))
    if options.plot:
        from plots import plot

        for path in plot(results, options.plot):
            print(path)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 6], help="of the models with 1B's widths")
    parser.add_argument("--quick", action="store_true", help="short prompts and contexts only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all readings' medians there")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw how cost grows, as PNG files")
    return parser.parse_args()


def rounds(forms: dict[str, Path], engines: list[str], count: int, quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Engine -> its readings, one per round."""
    readings: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    for number in range(count):
        for engine in engines if number % 2 == 0 else engines[::-1]:
            print(f"round {number + 1}: {engine}", file=sys.stderr, flush=True)
            plan = _plan(engine, quick, first=number == 0)
            readings[engine].append(_worker(engine, bench_models.for_engine(forms, engine), plan))
    return readings


def _plan(engine: str, quick: bool, *, first: bool) -> dict[str, Any]:
    """The measurements of an engine in a round."""
    longest = PREFILL[0] if quick else PREFILL[-1] if first else SLOW.get(engine, PREFILL[-1])
    return {
        "prefill": [length for length in PREFILL if length <= longest],
        "decode": DECODE[:1] if quick else DECODE,
        "tokens": TOKENS,
    }


def _worker(engine: str, path: Path, plan: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / "engines.py"), engine, str(path), json.dumps(plan)]
    run = subprocess.run([*command, str(time.time())], cwd=ROOT, capture_output=True, text=True)
    if run.returncode in (-signal.SIGSEGV, -signal.SIGILL) and NO_TILES not in os.environ:
        print(f"{engine} died of a signal; tried again without matrix tiles", file=sys.stderr)
        os.environ[NO_TILES] = "1"
        return _worker(engine, path, plan)
    if run.returncode:
        raise SystemExit(f"{engine} failed:\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def summary(readings: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Engine -> medians: "load", "first" (s), "peak" (bytes), "prefill 64", "decode 1024" (tokens/s), ..."""
    medians: dict[str, dict[str, float]] = {}
    for engine, by_round in readings.items():
        flat = [
            {key: one[key] for key in ("load", "first", "peak")}
            | {f"{what} {size}": rate for what in ("prefill", "decode") for size, rate in one[what].items()}
            for one in by_round
        ]
        keys = dict.fromkeys(key for one in flat for key in one)
        medians[engine] = {key: median(one[key] for one in flat if key in one) for key in keys}
    return medians


def table(title: str, medians: dict[str, dict[str, float]]) -> list[str]:
    """The table: a line per figure, a column per engine, with the factor by which this project is better."""
    lines = [f"{title}", f"{'':24}" + "".join(f"{engine:>22}" for engine in medians)]
    for key in dict.fromkeys(key for figures in medians.values() for key in figures):
        cells = [_cell(key, figures.get(key), medians[US].get(key)) for figures in medians.values()]
        name = {"load": "load, s", "first": "first token, s", "peak": "peak memory, MB"}.get(key, f"{key}, tokens/s")
        lines.append(f"{name:24}" + "".join(f"{cell:>22}" for cell in cells))
    return lines


def _cell(key: str, value: float | None, ours: float | None) -> str:
    if value is None:
        return "-"
    seconds = key in ("load", "first")
    text = f"{value / 1e6:.0f}" if key == "peak" else f"{value:.2f}" if seconds else f"{value:.1f}"
    if ours is None or value == ours:
        return text
    ratio = value / ours if key == "peak" or seconds else ours / value
    return f"{text} ({ratio:.2f}x)"


if __name__ == "__main__":
    main()
