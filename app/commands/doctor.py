"""`mlx-llama3 doctor`: its options. `run` imports the rest, so that `--help` does not import MLX."""

import argparse


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
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, for a bug report")


def run(args: argparse.Namespace) -> int:
    """Examine and print; returns 2 if the model cannot be loaded."""
    from app.machine.doctor import doctor

    return doctor(args.model, as_json=args.json)
