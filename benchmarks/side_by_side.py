"""This project beside mlx-lm, llama.cpp and transformers, on the same weights and machine in one run.

    python benchmarks/side_by_side.py [--rounds 3] [--layers 2 6] [--quick] [--json FILE] [--plot FOLDER]

The demo model (4 bits a weight on disk), and random weights in 1B's widths with some numbers of layers. Each engine is
measured in processes of its own; they take turns, the order turns with each round, and medians and their ratios are
printed. An engine that is not installed is left out, and said so.
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
# Longer prompts than this take an engine minutes (mlx-lm on a CPU): read in the first round alone.
SLOW = {"mlx-lm": 64}


def main() -> None:
    options = _options()
    engines = [engine for engine, package in PACKAGES.items() if find_spec(package)]
    for engine in PACKAGES.keys() - set(engines):
        print(f"{engine} is not installed and left out", file=sys.stderr)
    models = {"demo model, 135M": bench_models.demo()}
    for layers in options.layers:
        models[f"1B's widths, {layers} layers"] = bench_models.random_1b(layers)
    found: dict[str, Any] = {}
    for title, forms in models.items():
        readings = rounds(forms, engines, options.rounds, options.quick)
        found[title] = {"weights": bench_models.n_weights(forms), "engines": summary(readings)}
        print("\n".join(table(title, found[title]["engines"])), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    if options.plot:
        from plots import plot

        for path in plot(found, options.plot):
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
    """Each engine's readings, a round each."""
    readings: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    for number in range(count):
        for engine in engines if number % 2 == 0 else engines[::-1]:
            print(f"round {number + 1}: {engine}", file=sys.stderr, flush=True)
            plan = _plan(engine, quick, first=number == 0)
            readings[engine].append(_worker(engine, bench_models.for_engine(forms, engine), plan))
    return readings


def _plan(engine: str, quick: bool, *, first: bool) -> dict[str, Any]:
    """What an engine is asked for in a round."""
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
    """Each engine's medians: "load", "first" (s), "peak" (bytes), "prefill 64", "decode 1024" (tokens/s)."""
    found: dict[str, dict[str, float]] = {}
    for engine, each in readings.items():
        flat = [
            {key: one[key] for key in ("load", "first", "peak")}
            | {f"{what} {size}": rate for what in ("prefill", "decode") for size, rate in one[what].items()}
            for one in each
        ]
        keys = dict.fromkeys(key for one in flat for key in one)
        found[engine] = {key: median(one[key] for one in flat if key in one) for key in keys}
    return found


def table(title: str, found: dict[str, dict[str, float]]) -> list[str]:
    """A line a figure, a column an engine, with how many times as well this project does."""
    lines = [f"{title}", f"{'':24}" + "".join(f"{engine:>22}" for engine in found)]
    for key in dict.fromkeys(key for each in found.values() for key in each):
        cells = [_cell(key, each.get(key), found[US].get(key)) for each in found.values()]
        name = {"load": "load, s", "first": "first token, s", "peak": "peak memory, MB"}.get(key, f"{key}, tokens/s")
        lines.append(f"{name:24}" + "".join(f"{cell:>22}" for cell in cells))
    return lines


def _cell(key: str, value: float | None, ours: float | None) -> str:
    if value is None:
        return "-"
    seconds = key in ("load", "first")
    shown = f"{value / 1e6:.0f}" if key == "peak" else f"{value:.2f}" if seconds else f"{value:.1f}"
    if ours is None or value == ours:
        return shown
    ratio = value / ours if key == "peak" or seconds else ours / value
    return f"{shown} ({ratio:.2f}x)"


if __name__ == "__main__":
    main()
