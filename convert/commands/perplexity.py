"""The command `perplexity`: how well a model folder predicts a text."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add everything that `run` reads to a parser. Imports neither MLX nor numpy."""
    parser.description = (
        "Perplexity of a model FOLDER on a text: the lower, the better it predicts. Windows of CONTEXT tokens begin "
        "every STRIDE tokens, and each scores what the one before did not reach."
    )
    parser.add_argument("folder", metavar="FOLDER", help="model folder, alias or hub id")
    parser.add_argument("--text", metavar="FILE", type=Path, help="text in UTF-8 (default: a built-in one)")
    parser.add_argument("--context", type=int, help="tokens of a window (default: 2048, or what the model has)")
    parser.add_argument("--stride", type=int, help="tokens from window to window (default: half of the context)")


def run(args: argparse.Namespace) -> int:
    """Measure as the parsed options say and print one line on standard output; returns the exit code.

    UserError for everything that the person can mend.
    """
    from convert.verification.perplexity import perplexity
    from mlx_llama3.system.files import read_some_text
    from mlx_llama3.system.hub import resolve

    text = read_some_text(args.text) if args.text else None
    print(perplexity(resolve(args.folder), text=text, context=args.context, stride=args.stride))
    return 0
