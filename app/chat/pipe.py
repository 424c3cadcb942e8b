"""The chat in a pipe: plain text, one message per line of standard input; an error ends the program."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from app.options.stdin import read_stdin
from mlx_llama3.errors import UserError


class Plain:
    """The screen of a pipe: answers and command output go to standard output, the rest to standard error."""

    def welcome(self, text: str) -> None:
        """Print no greeting: a pipe needs none."""

    def messages(self, status: Callable[[], str], commands: Sequence[str]) -> Iterator[str]:
        """Messages and commands until the input ends; `status` and `commands` are for screens that show them."""
        return (line for line in read_stdin() if line.strip())

    @contextmanager
    def answering(self) -> Iterator[Callable[[], bool]]:
        """A context for one answer, never stopped: in a pipe Ctrl-C ends the program."""
        yield lambda: False

    def reading(self, done: int, total: int) -> None:
        """Ignore the prefill progress."""

    def write(self, text: str) -> None:
        """Print a piece of the answer."""
        print(text, end="", flush=True)

    def end_answer(self) -> None:
        """End the answer's line."""
        print(flush=True)

    def show(self, text: str) -> None:
        """Print the output of a command."""
        print(text, flush=True)

    def note(self, text: str) -> None:
        """Print a note that is not part of the answer."""
        print(f"({text})", file=sys.stderr, flush=True)

    def error(self, error: UserError) -> NoReturn:
        """Raise the error, so that a script sees it in the exit code."""
        raise error
