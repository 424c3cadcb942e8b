"""`mlx-llama3 bench`: rounds of workers in turns, and what they found as a table and as JSON."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from app.console import status_on_terminal, wipe_status
from app.machine.bench_worker import KERNELS, OURS, THEIRS
from app.machine.copy_speed import copy_speed
from app.machine.machine import Machine, mlx_lm_version, this_machine
from app.options.model import find_model
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import check_place

MEASURED = ("prefill", "decode")


def bench(args: argparse.Namespace) -> None:
    """Measure what the options of `bench_command` say, print the table, write the JSON. Raises `UserError`."""
    if args.json:
        check_place(args.json)
    machine = this_machine()
    title, folder = find_model(args.model)
    prompt = args.prompt or (512 if machine.metal else 128)
    tokens = args.tokens or (128 if machine.metal else 32)
    engines = [OURS] + ([THEIRS] if mlx_lm_version() and not args.no_mlx_lm else [])
    results = _rounds(engines, folder, prompt, tokens, args.rounds)
    asked = {"name": title, "prompt": prompt, "tokens": tokens, "rounds": args.rounds}
    found = summary(results, machine, asked, None if machine.bandwidth else copy_speed())
    try:
        if args.json:
            _write(args.json, found)
    finally:  # neither a full disk nor a reader that has left costs the other what minutes have found
        print("\n".join(lines(found)))


def _rounds(engines: list[str], folder: Path, prompt: int, tokens: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What the worker of each engine says in each round; each engine comes first in every other round."""
    results: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    for number in range(rounds):
        for engine in engines if number % 2 == 0 else engines[::-1]:
            if engine not in results:
                continue
            status_on_terminal(f"round {number + 1} of {rounds}: {engine:12}")
            result = _work(engine, [str(folder), str(prompt), str(tokens), str(number % 2)])
            if result is None:
                del results[engine]
            else:
                results[engine].append(result)
    wipe_status(40)
    return results


def _work(engine: str, words: list[str]) -> dict[str, Any] | None:
    """What one worker found; None for mlx-lm if it fails, which may not know a model that runs here."""
    command = [sys.executable, "-m", "app.machine.bench_worker", engine, *words]
    run = subprocess.run(command, capture_output=True, text=True)
    if engine == OURS and run.returncode == 0:
        sys.stderr.write(run.stderr)  # what the log says of kernels that were tried
    if run.returncode == 0:
        return json.loads(run.stdout.splitlines()[-1])
    if engine == THEIRS:
        last = run.stderr.strip().splitlines()[-1:] or ["no reason given"]
        print(f"{engine} is left out, it failed: {last[0]:.200}", file=sys.stderr)
        return None
    if run.returncode == 2:
        raise UserError(run.stderr.strip().splitlines()[-1])
    raise RuntimeError(f"the worker of {engine} failed:\n{run.stderr}")


def summary(
    results: dict[str, list[dict[str, Any]]], machine: Machine, asked: dict[str, Any], copy: float | None
) -> dict[str, Any]:
    """Medians, bandwidths and ratios of the rounds, with all readings.

    copy: 10**9 bytes a second of a plain copy, where the chip's bandwidth is not known.
    """
    ours = results[OURS][0]
    # Half of what is decoded is in the cache when the average token comes.
    cache = ours["cache"] * (asked["prompt"] + asked["tokens"] / 2)
    ways: dict[str, dict[str, Any]] = {}
    for rounds in results.values():
        for way, weights in rounds[0]["weights"].items():
            each_round = [_medians(each["readings"][way]) for each in rounds]
            medians = _medians(each_round)
            read = (weights + cache) * medians["decode"] / 1e9
            share = read / (machine.bandwidth or copy or read)
            readings = [reading for each in rounds for reading in each["readings"][way]]
            ways[way] = medians | {"GB/s": read, "share": share, "rounds": each_round, "readings": readings}
    return {
        "machine": asdict(machine),
        "model": asked | {"matrices": ours["matrices"], "kernels": ours["kernels"]},
        "copy": copy,
        "ways": ways,
        "ratios": _ratios(ways),
    }


def _medians(readings: list[dict[str, float]]) -> dict[str, float]:
    return {what: median(reading[what] for reading in readings) for what in MEASURED}


def _ratios(ways: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How many times as fast the first of the ways is, as the median of the rounds' own ratios: the machine's drift
    cancels out."""
    first = KERNELS if KERNELS in ways else OURS
    ratios: dict[str, dict[str, float]] = {}
    for way in ways:
        if way != first:
            pairs = list(zip(ways[first]["rounds"], ways[way]["rounds"], strict=True))
            ratios[f"{first} / {way}"] = {what: median(a[what] / b[what] for a, b in pairs) for what in MEASURED}
    return ratios


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The table."""
    machine, model = found["machine"], found["model"]
    yield f"{model['name']} on {machine['chip']}: {model['prompt']} tokens read, {model['tokens']} written, tokens/s"
    limit = found["machine"]["bandwidth"] or found["copy"]
    of = f"of {limit:.0f} GB/s"
    yield f"{'':24}{'read':>10}{'written':>10}{'GB/s':>10}{of:>16}"
    for way, each in found["ways"].items():
        name = f"{way} {machine['mlx_lm']}" if way == THEIRS else way
        yield f"{name:24}{each['prefill']:10.1f}{each['decode']:10.1f}{each['GB/s']:10.1f}{each['share']:16.0%}"
    for name, each in found["ratios"].items():
        yield f"{name:24}{each['prefill']:10.2f}{each['decode']:10.2f}"
    yield from _notes(found)


def _notes(found: dict[str, Any]) -> Iterator[str]:
    yield "GB/s: weights and cache that a written token reads. Medians of readings in turns."
    if found["copy"]:
        yield f"{found['copy']:.0f} GB/s is what a plain copy moves here: no specification of this chip is known."
    if KERNELS not in found["ways"]:
        yield "No fused kernel serves here; `mlx-llama3 doctor` says why."


def _write(path: Path, found: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
