"""`mlx-llama3 bench`: its options. `run` imports the rest, so that `--help` does not import MLX."""

import argparse
from pathlib import Path

from app.options.options import add_model_option, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-llama3 bench`."""
    parser.description = (
        "Measure how fast a model reads a prompt and writes an answer here: with the fused kernels, with their "
        "references, and in mlx-lm if that is installed, in turns, as medians."
    )
    add_model_option(parser)
    parser.add_argument("--prompt", type=positive, metavar="N", help="tokens to read (default: 512; on a CPU 128)")
    parser.add_argument("--tokens", type=positive, metavar="N", help="tokens to write (default: 128; on a CPU 32)")
    parser.add_argument(
        "--rounds",
        type=positive,
        metavar="N",
        default=3,
        help="rounds; each engine runs twice in one (default: 3)",
    )
    parser.add_argument("--no-mlx-lm", action="store_true", help="leave mlx-lm out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all readings there too, for a bug report")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Raises `UserError`."""
    from app.machine.bench import bench

    bench(args)
    return 0
