"""Several reports of `mlx-llama3 doctor --report FILE` as one table in Markdown, for docs/mac-results.md.

    python -m benchmarks.mac_results REPORT.json ...

A row is a machine and a model. "kernels" counts those in use of all; "time" is that of a decoding step with them, as a
share of the references'; the speeds are tokens per second.
"""

import json
import sys
from pathlib import Path
from typing import Any

HEAD = (
    *("chip", "macOS, MLX", "model", "products", "kernels", "wrong or failed", "time"),
    *("kernels, plain, mlx-lm", "norms", "copies"),
)


def table(reports: list[dict[str, Any]]) -> str:
    """The reports, ordered by chip and size of the model."""
    ordered = sorted(reports, key=lambda report: (report["machine"]["chip"], report["model"]["bytes"]))
    rows = [HEAD, ("---",) * len(HEAD), *(_row(report) for report in ordered)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _row(report: dict[str, Any]) -> tuple[str, ...]:
    machine, sections = report["machine"], report["sections"]
    return (
        machine["chip"],
        f"{machine['system'].removeprefix('macOS ')}, {machine['mlx']}",
        _model(report["model"]),
        ", ".join(sorted({check["verdict"] for check in report["matrices"]})),
        _in_use(report["kernels"]),
        _faults(sections.get("kernels", {})),
        _ratio(sections.get("step", {})),
        *_speeds(sections["decoding"], report["mlx-lm"]),
    )


def _model(model: dict[str, Any]) -> str:
    quantization = model["quantization"]
    packing = f"{quantization['bits']}-bit {quantization['mode']}" if quantization else "dense"
    return f"{model['n_layers']} x {model['dim']}, {packing}, {model['bytes'] / 1e9:.1f} GB"


def _in_use(kernels: dict[str, Any]) -> str:
    decisions = [by_rows.values() for name, by_rows in kernels.items() if name != "asked"]
    used = sum(any(decision["state"] == "used" for decision in each) for each in decisions)
    return f"{used} of {len(decisions)}"


def _faults(kernels: dict[str, Any]) -> str:
    """The kernels that are wrong or do not run, with what the compiler said first."""
    if "failed" in kernels:
        return f"the process ended: {kernels['failed']}"
    faults = []
    for kernel, cases in kernels.items():
        for case in cases:
            if not case["right"]:
                faults.append(f"{kernel}, {case['case']}: {case.get('failed', 'wrong')}")
    return "; ".join(faults) or "none"


def _ratio(step: dict[str, Any]) -> str:
    return f"{step['ratio']:.2f}" if "ratio" in step else step.get("failed", "-")


def _speeds(decoding: dict[str, Any], mlx_lm: dict[str, Any] | None) -> tuple[str, str, str]:
    """Three speeds; decoding with live norms, and with a large buffer, as shares of decoding without."""
    if "failed" in decoding:
        return decoding["failed"], "-", "-"
    speeds = decoding["decode"]
    base = speeds["chosen kernels"]
    theirs = "-"
    if mlx_lm and "readings" in mlx_lm:
        theirs = f"{max(reading['decode'] for reading in mlx_lm['readings']['mlx-lm']):.0f}"
    return (
        f"{base:.0f}, {speeds['references']:.0f}, {theirs}",
        f"{speeds['chosen kernels, live norms'] / base:.2f}",
        f"{speeds['chosen kernels, buffer of 8,192 positions'] / base:.2f}",
    )


def main(paths: list[str]) -> int:
    """Print the table of the files."""
    if not paths:
        print("usage: python -m benchmarks.mac_results REPORT.json ...", file=sys.stderr)
        return 2
    reports = []
    for path in paths:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(report, dict) or report.get("format") != "mlx-llama3 report" or report.get("version") != 1:
            print(f"error: {path} is not a report of mlx-llama3 doctor --report", file=sys.stderr)
            return 2
        reports.append(report)
    print(table(reports))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
