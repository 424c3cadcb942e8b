"""The chat in a pipe: plain text, each line of standard input a message, errors end the program."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from app.options.stdin import read_stdin
from mlx_llama3.errors import UserError


class Plain:
    """Standard output gets the answers and what commands show, standard error the rest."""

    def welcome(self, text: str) -> None:
        """A greeting; a pipe needs none."""

    def messages(self, status: Callable[[], str], commands: Sequence[str]) -> Iterator[str]:
        """Messages and commands, until the input ends. status, commands: for a screen that can show them."""
        return (line for line in read_stdin() if line.strip())

    @contextmanager
    def answering(self) -> Iterator[Callable[[], bool]]:
        """Around an answer; gives a function that tells whether to stop. In a pipe Ctrl-C ends the program."""
        yield lambda: False

    def reading(self, done: int, total: int) -> None:
        """So much of the prompt is read; a pipe need not know."""

    def write(self, text: str) -> None:
        """A piece of the answer."""
        print(text, end="", flush=True)

    def end_answer(self) -> None:
        """The answer is complete."""
        print(flush=True)

    def show(self, text: str) -> None:
        """What a command was asked for."""
        print(text, flush=True)

    def note(self, text: str) -> None:
        """Something worth knowing that is not part of the answer."""
        print(f"({text})", file=sys.stderr, flush=True)

    def error(self, error: UserError) -> NoReturn:
        """A script must learn of it by the exit code."""
        raise error
