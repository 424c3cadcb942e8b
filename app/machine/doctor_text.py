"""The report of `mlx-llama3 doctor` as text."""

from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from app.machine.dispatches import MLX_LM
from app.machine.mlx_wheel import missing_matrix_units

WIDTH = 120  # of the longest line that is wrapped
VERDICTS = {
    "right": "right",
    "TF32": "computed in TF32, with 11 bits; MLX_ENABLE_TF32=0 turns that off",
    "wrong": "WRONG: do not trust any answer of this MLX on this system; update macOS and mlx, and report it to MLX",
}
STATES = {"used": "used", "slower": "slower", "failed": "failed", "absent": "not used"}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The whole report, line by line; report: from `doctor.examine`."""
    model = _model(report["model"]) if report["model"] else _no_model(report["error"])
    parts = (_machine(report["machine"]), _matrices(report), model, _kernels(report), _dispatches(report["dispatches"]))
    for part in parts:
        yield from part
        yield ""
    yield "For a bug report, copy all of this or attach what `mlx-llama3 doctor --json` prints, and add:"
    yield "  the command, and everything that it printed with --debug; where the model comes from; what you expected"


def _machine(machine: dict[str, Any]) -> Iterator[str]:
    lm = f", mlx-lm {machine['mlx_lm']}" if machine["mlx_lm"] else ""
    speed = f", {machine['bandwidth']:g} GB/s by Apple's specification" if machine["bandwidth"] else ""
    where = "on the GPU, with Metal" if machine["metal"] else "on the CPU: no Metal here, which is for development"
    yield f"mlx-llama3 {machine['version']}, MLX {machine['mlx']}{lm}"
    yield f"system    {machine['system']}, Python {machine['python']}"
    yield f"chip      {machine['chip']}{speed}"
    yield f"memory    {_gb(machine['memory'])}, of which models may take {_gb(machine['available'])}"
    yield f"computes  {where}"
    if warning := missing_matrix_units(machine["chip"], machine["wheel"]):
        yield f"warning   {warning}"


def _matrices(report: dict[str, Any]) -> Iterator[str]:
    """The verdict on the products of a large matrix against float64, one line each if one of them is not right."""
    checks = report["matrices"]
    if all(check["verdict"] == "right" for check in checks):
        kinds = ", ".join(f"{check['weights']} {check['dtype']}" for check in checks)
        text = f"products  of a large matrix are right, compared with float64: {kinds}"
        yield from wrap(text, WIDTH, subsequent_indent=10 * " ", break_on_hyphens=False)
        return
    for check in checks:
        yield (
            f"products  {check['weights']} {check['dtype']}: {VERDICTS[check['verdict']]} "
            f"(relative error {check['error']:.1g} to float64)"
        )


def _no_model(error: str | None) -> Iterator[str]:
    yield f"model     none was examined: {error or 'the demo model was never fetched; name another one with --model'}"


def _model(model: dict[str, Any]) -> Iterator[str]:
    yield f"model     {model['name']}: {model['layers']} layers of width {model['dim']}, computed in {model['dtype']}"
    yield f"weights   {_gb(model['weights'])} of memory"
    yield f"context   {model['context']} tokens at most"
    yield f"  {'cache':16}{'a token':>12}{'full context':>16}{'fits into memory':>24}"
    for cache in model["caches"]:
        kind = "full precision" if cache["kv_bits"] is None else f"--kv-bits {cache['kv_bits']}"
        if "error" in cache:
            yield f"  {kind:16}{cache['error']}"
            continue
        fits = "all" if cache["fits"] == model["context"] else f"{cache['fits']} tokens"
        yield f"  {kind:16}{cache['bytes a token'] / 1000:9.1f} kB{_gb(cache['full context']):>16}{fits:>24}"


def _kernels(report: dict[str, Any]) -> Iterator[str]:
    kernels = dict(report["kernels"])
    yield f"kernels   MLX_LLAMA3_KERNELS is {kernels.pop('asked')}"
    for name, by_rows in kernels.items():
        for number, (rows, decision) in enumerate(by_rows.items()):
            yield f"  {'' if number else name:16}{rows:14}{STATES[decision['state']]:10}{decision['reason']}"


def _dispatches(rows: list[dict[str, Any]]) -> Iterator[str]:
    columns = ("references", "kernels", "in use")
    yield "dispatches of a layer for one decoded token"
    yield f"  {'':40}" + "".join(f"{column:>12}" for column in columns)
    for row in rows:
        yield f"  {row['part']:40}" + "".join(f"{row[column]:12}" for column in columns)
    sums = [sum(row[column] for row in rows) for column in columns]
    yield f"  {f'all ({MLX_LM} in mlx-lm)':40}" + "".join(f"{count:12}" for count in sums)


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
