"""`python -m convert`: the converter alone."""

import argparse
import sys
from collections.abc import Sequence

from convert.commands.convert import add_arguments, run
from mlx_llama3.errors import UserError

INTERRUPTED = 130  # 128 + SIGINT, the convention of shells


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and convert. A `UserError` prints one line, with `--debug` its traceback.

    Returns the exit code: 0 for success, 2 for a `UserError`, 130 for Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="python -m convert")
    add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except UserError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
