"""`mlx-llama3 doctor`: its options. The rest is imported when it runs, so that `--help` costs no import of MLX."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mlx-llama3 doctor`."""
    parser.description = (
        "Show the machine, what a model takes of its memory, and which kernels serve it. On a Mac the kernels are "
        "tried if they were not yet."
    )
    parser.add_argument(
        "-m",
        "--model",
        metavar="NAME",
        help="a folder, a hub id, or an alias such as llama3.2-1b (default: the demo model, if it was fetched before)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, for a bug report")


def run(args: argparse.Namespace) -> int:
    """Look, and print; 2 if the model could not be loaded."""
    from app.machine.doctor import doctor

    return doctor(args.model, as_json=args.json)
