"""The command `verify`: compares a converted folder with its source."""

import argparse
from pathlib import Path

NOT_VERIFIED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` reads. Imports neither MLX nor numpy."""
    parser.description = (
        "Compare a converted FOLDER with its SOURCE, tensor by tensor, and run both on a text, with one layer in "
        "memory at a time. The exit code is 1 if the configurations differ, or a tensor by more than its "
        "quantization allows."
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the converted model folder")
    parser.add_argument("--against", metavar="SOURCE", required=True, help="checkpoint, as for convert")
    parser.add_argument("--adapter", metavar="FOLDER", type=Path, help="the LoRA adapter that was fused")
    parser.add_argument("--rope-factor", type=float, metavar="X", help="as given to convert")
    parser.add_argument("--text", metavar="FILE", type=Path, help="text to run both on (default: a built-in one)")
    parser.add_argument("--write-card", action="store_true", help="add the result to the folder's README.md")
    parser.add_argument("--no-run", action="store_true", help="only compare the tensors")


def run(args: argparse.Namespace) -> int:
    """Verify as the parsed options say, print the result on standard output and return the exit code.

    Raises `UserError` for everything that the person can fix.
    """
    from convert.conversion.report import add_to_card
    from convert.sources.find import find_source
    from convert.verification.verify import verify
    from mlx_llama3.system.files import read_some_text

    verification = verify(
        args.folder,
        find_source(args.against),
        adapter=args.adapter,
        rope_factor=args.rope_factor,
        text=read_some_text(args.text) if args.text else None,
        run=not args.no_run,
    )
    print(verification)
    if args.write_card:
        add_to_card(args.folder, str(verification))
    return 0 if verification.ok else NOT_VERIFIED
