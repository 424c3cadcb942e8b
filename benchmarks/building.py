"""The cost of a decoded token before any computation: the operations in its graph, and the time to build it.

    python benchmarks/building.py [--rounds 12]

The demo model as it runs here, alternating with mlx-lm's llama of the same weights in one process; medians. Each graph
is evaluated before the next is built, as in a chat, so the CPU caches are full of weights.
"""

import argparse
import io
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import bench_models
from engines import MlxLm, Ours, prompt

import mlx.core as mx

CONTEXT = 100
TOKENS = {"mlx-llama3": 8, "mlx-lm": 2}  # per round; one of mlx-lm takes a fifth of a second on a CPU


def ours(engine: Ours, token: mx.array) -> Callable[[], mx.array]:
    """A function that builds one token's logits after the context."""
    cache = engine.model.make_cache()
    mx.eval(engine.model(mx.array([prompt(CONTEXT)]), 0, cache))
    return lambda: engine.model(token, cache[0].offset, cache)


def theirs(engine: MlxLm, token: mx.array) -> Callable[[], mx.array]:
    """Like `ours`, for mlx-lm's model."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(engine.model)
    mx.eval(engine.model(mx.array([prompt(CONTEXT)]), cache=cache))
    return partial(engine.model, token, cache=cache)


def operations(build: Callable[[], mx.array]) -> int:
    """The number of nodes in a token's graph."""
    text = io.StringIO()
    mx.export_to_dot(text, build())
    return len(re.findall(r'label ?="\w+"', text.getvalue()))


def seconds(build: Callable[[], mx.array]) -> float:
    """Seconds to build the graph once; it is evaluated afterwards."""
    begin = time.perf_counter()
    logits = build()
    elapsed = time.perf_counter() - begin
    mx.eval(logits)
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    model, token = bench_models.demo(), mx.array([[100]])
    builds: dict[str, Any] = {
        "mlx-llama3": ours(Ours(model["folder"]), token),
        "mlx-lm": theirs(MlxLm(model["folder"]), token),
    }
    times: dict[str, list[float]] = {name: [] for name in builds}
    for _ in range(rounds):
        for name, build in builds.items():
            times[name] += [seconds(build) for _ in range(TOKENS[name])]
    medians = {name: 1e3 * statistics.median(readings) for name, readings in times.items()}
    for name, build in builds.items():
        print(f"{name:<11} {operations(build):>5} operations a token, built in {medians[name]:.2f} ms")
    print(f"share of mlx-lm's time: {medians['mlx-llama3'] / medians['mlx-lm']:.2f}")


if __name__ == "__main__":
    main()
