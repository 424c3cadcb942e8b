"""The command line: finds the subcommand, and turns errors into one line and an exit code.

Nothing heavy is imported before the arguments are parsed, so that `--help` answers at once.
"""

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from app.options.ranks import in_front, quiet_unless_in_front

# Subcommand: its module, which has add_arguments(parser) and run(args), and its line in --help.
COMMANDS = {
    "chat": ("app.commands.chat", "talk with a model in the terminal"),
    "generate": ("app.commands.generate", "answer one prompt and end"),
    "cache": ("app.commands.cache", "read a long text once and keep its KV cache in a file"),
    "trace": ("app.commands.trace", "write the activations of a run to a file, or show such a file"),
    "app": ("app.commands.app", "open the desktop UI: chat, and look inside while the model speaks"),
    "convert": ("convert.commands.convert", "turn a published checkpoint into a model folder"),
    "verify": ("convert.commands.verify", "compare a converted folder with its source"),
    "perplexity": ("convert.commands.perplexity", "how well a model predicts a text"),
    "doctor": ("app.commands.doctor", "show the machine, the memory and which kernels serve a model"),
    "bench": ("app.commands.bench", "measure how fast a model reads and writes here"),
}

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE = 141  # 128 + SIGPIPE


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, like all others of this program."""

    def error(self, message: str) -> NoReturn:
        """Print `error: …` and the way to the help, and exit with code 2."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


class ShowVersion(argparse.Action):
    """`--version`; the version is imported only for this option."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from mlx_llama3 import __version__

        print(f"mlx-llama3 {__version__}")
        parser.exit()


def build_parser(command: str | None) -> Parser:
    """The parser. Only `command` gets its arguments, because adding them imports its module."""
    parser = Parser(prog="mlx-llama3", description="Llama 3 on Apple silicon: chat, generate, convert.")
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="show the version and exit")
    parser.add_argument("--debug", action="store_true", help="show the whole traceback of an error")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == command:
            subparser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
            import_module(module).add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for an error that the person can mend, 130 for Ctrl-C."""
    _open_closed_streams()
    argv = sys.argv[1:] if argv is None else list(argv)
    command = next((word for word in argv if not word.startswith("-")), None)
    try:
        try:
            with quiet_unless_in_front():
                args = build_parser(command).parse_args(argv)
        except SystemExit as done:
            return int(done.code or 0)
        return _run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has left. Python flushes standard output once more at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"error: {error.filename or 'standard output'}: the disk is full; make room", file=sys.stderr)
        return 2


def _open_closed_streams() -> None:
    """Open streams that the caller closed (`>&-`) on the null device; else the next file would take their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _run(args: argparse.Namespace) -> int:
    from mlx_llama3.errors import UserError  # here, because importing the library loads its BLAS

    # A terminal in another encoding shows what it can instead of failing in the middle of an answer.
    sys.stdout.reconfigure(errors="replace")
    try:
        with in_front(args) as here:
            code = import_module(COMMANDS[args.command][0]).run(args) if here else 0
        sys.stdout.flush()
        return code or 0
    except UserError as error:
        if args.debug:
            traceback.print_exc()
        else:
            sys.stdout.flush()
            print("error:", " ".join(str(error).split("\n")), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
