"""The command `verify`: is a converted folder what its source means?"""

import argparse
from pathlib import Path

NOT_VERIFIED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add everything that `run` reads to a parser. Imports neither MLX nor numpy."""
    parser.description = (
        "Compare a converted FOLDER with its SOURCE, tensor by tensor, and run both on a text, one layer in memory "
        "at a time. The exit code is 1 if a tensor is not what it should be."
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="what convert wrote")
    parser.add_argument("--against", metavar="SOURCE", required=True, help="checkpoint, as for convert")
    parser.add_argument("--adapter", metavar="FOLDER", type=Path, help="the LoRA adapter that was fused")
    parser.add_argument("--rope-factor", type=float, metavar="X", help="as given to convert")
    parser.add_argument("--text", metavar="FILE", type=Path, help="text to run both on (default: a built-in one)")
    parser.add_argument("--write-card", action="store_true", help="add the findings to the folder's README.md")
    parser.add_argument("--no-run", action="store_true", help="only compare the tensors")


def run(args: argparse.Namespace) -> int:
    """Verify as the parsed options say and print the findings on standard output; returns the exit code.

    UserError for everything that the person can mend.
    """
    from convert.conversion.report import add_to_card
    from convert.sources.find import find_source
    from convert.verification.verify import verify
    from mlx_llama3.system.files import read_some_text

    found = verify(
        args.folder,
        find_source(args.against),
        adapter=args.adapter,
        rope_factor=args.rope_factor,
        text=read_some_text(args.text) if args.text else None,
        run=not args.no_run,
    )
    print(found)
    if args.write_card:
        add_to_card(args.folder, str(found))
    return 0 if found.ok else NOT_VERIFIED
