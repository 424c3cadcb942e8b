"""Collects a report: what another person needs to know of how a model runs on a Mac, and nothing about its owner.

The file holds no name of a person, machine or model, no path and no text. A model is told by its shapes.
"""

import json
import re
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.console import status_on_terminal, wipe_status
from app.machine.bench_worker import THEIRS
from app.machine.doctor import examine
from app.machine.machine import mlx_lm_version
from app.options.model import find_model
from app.report.worker import SECTIONS
from mlx_llama3.autotune.choice import has_metal
from mlx_llama3.checkpoint.folder import Checkpoint
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import check_place, replacing

FORMAT, VERSION = "mlx-llama3 report", 1
TIMEOUT_SECONDS = 900
# Sections that run the fused kernels, which need a GPU.
NEED_METAL = ("kernels", "step")
_PATH = re.compile(r"(?<!\w)(?:~|/[^\s/:'\"]+)(?:/[^\s/:'\"]+)*/([^\s/:'\"]+)")


def write_report(name: str, path: Path) -> None:
    """Examine the model `name` on this machine and write the report to `path`.

    Raises `UserError` for a place that cannot be written, and for a model that is absent.
    """
    check_place(path)
    _, folder = find_model(name)
    report = collect(name, folder)
    try:
        with replacing(path) as partial:
            partial.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
    print(f"{path}: written; docs/mac-results.md says how to send it")


def collect(name: str, folder: Path) -> dict[str, Any]:
    """The whole report as a JSON object."""
    examined = examine(name)
    sections = [section for section in SECTIONS if has_metal() or section not in NEED_METAL]
    report = {
        "format": FORMAT,
        "version": VERSION,
        "machine": examined["machine"],
        "matrices": examined["matrices"],
        "model": _shapes(folder),
        "kernels": examined["kernels"],
        "sections": {section: _run(section, folder) for section in sections},
        "mlx-lm": _mlx_lm(folder),
    }
    return _anonymous(report)


def _shapes(folder: Path) -> dict[str, Any]:
    """The model by its shapes and packing."""
    checkpoint = Checkpoint(folder)
    args = asdict(checkpoint.args)
    quantization = checkpoint.quantization("model.layers.0.self_attn.o_proj")
    return args | {"quantization": quantization and asdict(quantization), "bytes": checkpoint.nbytes}


def _run(section: str, folder: Path) -> Any:
    """The result of a section's process, or `{"failed": reason}`."""
    status_on_terminal(f"measuring: {section:12}")
    try:
        command = [sys.executable, "-m", "mlx_llama3_main", "app.report.worker", section, str(folder)]
        return _json_of(command)
    finally:
        wipe_status(30)


def _mlx_lm(folder: Path) -> Any:
    """The speed of mlx-lm in its own process; None where it is not installed."""
    if mlx_lm_version() is None:
        return None
    status_on_terminal(f"measuring: {THEIRS:12}")
    try:
        command = [sys.executable, "-m", "mlx_llama3_main", "app.machine.bench_worker", THEIRS, str(folder)]
        return _json_of([*command, "128", "64", "0"])
    finally:
        wipe_status(30)


def _json_of(command: list[str]) -> Any:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {TIMEOUT_SECONDS} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    ended = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    return {"failed": f"{ended}: {last:.500}"}


def _anonymous(value: Any) -> Any:
    """The value with every path in its texts cut down to its last part."""
    if isinstance(value, dict):
        return {key: _anonymous(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_anonymous(each) for each in value]
    return _PATH.sub(r"\1", value) if isinstance(value, str) else value
