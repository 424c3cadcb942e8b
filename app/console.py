"""What goes to a terminal: text made harmless, and status lines on standard error that replace one another."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

# A model's text must not steer the terminal: control characters other than tab and newline become visible ones.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
VISIBLE |= dict.fromkeys(range(127, 160), 0xFFFD) | {ord("\r"): None}


def status(text: str) -> None:
    """Write a line on standard error; on a terminal it takes the place of the status line before it.

    `text` ends with a newline where it is to stay.
    """
    print(("\r" if sys.stderr.isatty() else "") + text, end="", file=sys.stderr, flush=True)


def status_on_terminal(text: str) -> None:
    """As `status`, but nothing is written where standard error is no terminal."""
    if sys.stderr.isatty():
        status(text)


@contextmanager
def status_while(text: str) -> Iterator[None]:
    """Show a line while something takes its time; only on a terminal, where it is wiped afterwards."""
    status_on_terminal(text)
    try:
        yield
    finally:
        wipe_status(len(text))


def wipe_status(width: int) -> None:
    """Wipe a status line of so many characters, if standard error is a terminal."""
    status_on_terminal(" " * width + "\r")
