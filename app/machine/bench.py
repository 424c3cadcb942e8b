"""`mlx-llama3 bench`: alternating rounds of worker processes, and their readings as a table and as JSON."""

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
    """Measure as the options of `commands/bench.py` request, print the table, write the JSON. Raises `UserError`."""
    if args.json:
        check_place(args.json)
    machine = this_machine()
    title, folder = find_model(args.model)
    prompt = args.prompt or (512 if machine.metal else 128)
    tokens = args.tokens or (128 if machine.metal else 32)
    engines = [OURS] + ([THEIRS] if mlx_lm_version() and not args.no_mlx_lm else [])
    results = _rounds(engines, folder, prompt, tokens, args.rounds)
    request = {"name": title, "prompt": prompt, "tokens": tokens, "rounds": args.rounds}
    report = summary(results, machine, request, None if machine.bandwidth else copy_speed())
    try:
        if args.json:
            _write(args.json, report)
    finally:  # readings take minutes: a file that cannot be written must not lose the table
        print("\n".join(lines(report)))


def _rounds(engines: list[str], folder: Path, prompt: int, tokens: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """The results of each engine's worker, one per round; the order of the engines is reversed in every other round."""
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


def _work(engine: str, arguments: list[str]) -> dict[str, Any] | None:
    """The result of one worker; None if mlx-lm's fails, which may not support a model that runs here."""
    command = [sys.executable, "-m", "mlx_llama3_main", "app.machine.bench_worker", engine, *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    if engine == OURS and run.returncode == 0:
        sys.stderr.write(run.stderr)  # the log of the kernels' trials
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
    results: dict[str, list[dict[str, Any]]], machine: Machine, request: dict[str, Any], copy: float | None
) -> dict[str, Any]:
    """Medians, bandwidths and ratios of the rounds, with all readings.

    copy: the bandwidth of a plain copy in 10**9 bytes per second, if the chip's is not known.
    """
    ours = results[OURS][0]
    # The average decoded token reads a cache of the prompt and half of the decoded tokens.
    cache = ours["cache"] * (request["prompt"] + request["tokens"] / 2)
    variants: dict[str, dict[str, Any]] = {}
    for rounds in results.values():
        for variant, weights in rounds[0]["weights"].items():
            by_round = [_medians(result["readings"][variant]) for result in rounds]
            medians = _medians(by_round)
            read = (weights + cache) * medians["decode"] / 1e9
            share = read / (machine.bandwidth or copy or read)
            readings = [reading for result in rounds for reading in result["readings"][variant]]
            variants[variant] = medians | {"GB/s": read, "share": share, "rounds": by_round, "readings": readings}
    return {
        "machine": asdict(machine),
        "model": request | {"matrices": ours["matrices"], "kernels": ours["kernels"]},
        "copy": copy,
        "ways": variants,
        "ratios": _ratios(variants),
    }


def _medians(readings: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(reading[name] for reading in readings) for name in MEASURED}


def _ratios(variants: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The speed of this project over that of each other variant.

    It is the median of the ratios within a round, in which the machine's drift cancels out.
    """
    first = KERNELS if KERNELS in variants else OURS
    ratios: dict[str, dict[str, float]] = {}
    for other in variants:
        if other != first:
            pairs = list(zip(variants[first]["rounds"], variants[other]["rounds"], strict=True))
            ratios[f"{first} / {other}"] = {name: median(a[name] / b[name] for a, b in pairs) for name in MEASURED}
    return ratios


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The lines of the table; report: from `summary`."""
    machine, model = report["machine"], report["model"]
    yield f"{model['name']} on {machine['chip']}: {model['prompt']} tokens read, {model['tokens']} written, tokens/s"
    limit = machine["bandwidth"] or report["copy"]
    of = f"of {limit:.0f} GB/s"
    yield f"{'':24}{'read':>10}{'written':>10}{'GB/s':>10}{of:>16}"
    for variant, row in report["ways"].items():
        name = f"{variant} {machine['mlx_lm']}" if variant == THEIRS else variant
        yield f"{name:24}{row['prefill']:10.1f}{row['decode']:10.1f}{row['GB/s']:10.1f}{row['share']:16.0%}"
    for name, ratio in report["ratios"].items():
        yield f"{name:24}{ratio['prefill']:10.2f}{ratio['decode']:10.2f}"
    yield from _notes(report)


def _notes(report: dict[str, Any]) -> Iterator[str]:
    yield "GB/s: bytes of weights and cache that decoding reads. All figures are medians of alternating rounds."
    if report["copy"]:
        yield f"{report['copy']:.0f} GB/s is what a plain copy moves here: no specification of this chip is known."
    used = {name: rows for name, rows in report["model"]["kernels"].items() if rows != "none"}
    if used:
        yield f"Fused kernels: {'; '.join(f'{name} at {rows}' for name, rows in used.items())}."
    else:
        yield "No fused kernel is in use here; `mlx-llama3 doctor` says why."


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
