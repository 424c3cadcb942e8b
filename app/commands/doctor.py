"""`mlx-llama3 doctor`: its options. `run` imports the rest, so that `--help` does not import MLX."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-llama3 doctor`."""
    parser.description = (
        "Show the machine, how much of its memory a model takes, and which kernels serve the model. On a Mac, kernels "
        "that were not tried yet are tried."
    )
    parser.add_argument(
        "-m",
        "--model",
        metavar="NAME",
        help="a folder, a hub id, or an alias such as llama3.2-1b (default: the demo model, if it was fetched before)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object instead, for a bug report")
    output.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="measure for some minutes, and write all results to FILE to send in; no name, path or text is in it",
    )


def run(args: argparse.Namespace) -> int:
    """Examine and print; returns 2 if the model cannot be loaded."""
    if args.report is not None:
        from app.report.report import write_report

        write_report(args.model or "demo", args.report)
        return 0
    from app.machine.doctor import doctor

    return doctor(args.model, as_json=args.json)
