"""Prompt and decode speed of this project beside mlx-lm, on the same folder and machine in one run.

    python benchmarks/side_by_side.py [--model FOLDER] [--rounds 3] [--prompt 256] [--tokens 32]

Each measurement is a process of its own (a BLAS loaded for one would serve the other too); the two alternate, the
order turns with each round, medians and their ratio are printed, and as JSON in the last line.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

ENGINES = ("mlx-llama3", "mlx-lm")


def ours(folder: str, prompt: list[int], count: int) -> Iterator[int]:
    """Tokens of this project's `generate`, greedy, through stop ids."""
    import mlx_llama3

    model, tokenizer = mlx_llama3.load(folder)
    ban = {token: float("-inf") for token in tokenizer.stop_ids}
    yield -1  # loaded
    for step in mlx_llama3.generate(model, tokenizer, prompt, max_tokens=count, logit_bias=ban):
        yield step.token


def theirs(folder: str, prompt: list[int], count: int) -> Iterator[int]:
    """Tokens of mlx-lm's `generate_step`, greedy, through stop ids."""
    from pathlib import Path

    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(folder))
    if mx.default_device() == mx.cpu:
        model.set_dtype(mx.float32)  # as stored, in float16, it would be about a hundred times slower there
    mx.eval(model.parameters())
    yield -1  # loaded
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=count):
        yield int(token)


def measure(engine: str, folder: str, length: int, count: int) -> dict[str, float]:
    """One run: prompt tokens/s to the first token, and tokens/s after it."""
    prompt = [100 + 7 * i % 10000 for i in range(length)]
    stream = (ours if engine == ENGINES[0] else theirs)(folder, prompt, count)
    next(stream)
    begin = time.perf_counter()
    next(stream)
    first = time.perf_counter()
    decoded = sum(1 for _ in stream)
    end = time.perf_counter()
    return {"prefill": length / (first - begin), "decode": decoded / (end - first)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder; default: the demo model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=32, help="decoded tokens")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.worker, options.model, options.prompt, options.tokens)))
        return
    if options.model is None:
        from convert.demo import demo_model

        options.model = str(demo_model())
    results: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    for round_number in range(options.rounds):
        for engine in ENGINES if round_number % 2 == 0 else reversed(ENGINES):
            command = [sys.executable, __file__, "--worker", engine, "--model", options.model]
            command += ["--prompt", str(options.prompt), "--tokens", str(options.tokens)]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            results[engine].append(json.loads(run.stdout.splitlines()[-1]))
    report(results)


def report(results: dict[str, list[dict[str, float]]]) -> None:
    """The table, and the same as one line of JSON."""
    summary: dict[str, dict[str, float]] = {}
    print(f"{'tokens/s':10}" + "".join(f"{engine:>14}" for engine in ENGINES) + f"{'ratio':>10}")
    for what in ("prefill", "decode"):
        medians = {engine: statistics.median(run[what] for run in results[engine]) for engine in ENGINES}
        summary[what] = medians | {"ratio": medians[ENGINES[0]] / medians[ENGINES[1]]}
        print(f"{what:10}" + "".join(f"{medians[e]:14.1f}" for e in ENGINES) + f"{summary[what]['ratio']:10.1f}")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
