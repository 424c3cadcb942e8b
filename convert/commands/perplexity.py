"""The command `perplexity`: how well a model folder predicts a text."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` reads. Imports neither MLX nor numpy."""
    parser.description = (
        "Perplexity of a model FOLDER on a text; lower is better. Windows of CONTEXT tokens begin every STRIDE tokens, "
        "and each scores the tokens that the window before did not."
    )
    parser.add_argument("folder", metavar="FOLDER", help="model folder, alias or hub id")
    parser.add_argument("--text", metavar="FILE", type=Path, help="text in UTF-8 (default: a built-in one)")
    parser.add_argument("--context", type=int, help="tokens per window (default: 2048, at most the model's)")
    parser.add_argument("--stride", type=int, help="tokens between window starts (default: half of the context)")


def run(args: argparse.Namespace) -> int:
    """Measure as the parsed options say, print one line on standard output and return the exit code.

    Raises `UserError` for everything that the person can fix.
    """
    from convert.verification.perplexity import perplexity
    from mlx_llama3.system.files import read_some_text
    from mlx_llama3.system.hub import resolve

    text = read_some_text(args.text) if args.text else None
    print(perplexity(resolve(args.folder), text=text, context=args.context, stride=args.stride))
    return 0
