"""Terminal output: control characters made visible, and status lines on standard error that overwrite each other."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

# A model's text must not control the terminal: control characters except tab and newline become visible symbols.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
VISIBLE |= dict.fromkeys(range(127, 160), 0xFFFD) | {ord("\r"): None}


def status(text: str) -> None:
    """Write a line on standard error; on a terminal it overwrites the previous status line.

    A `text` that ends with a newline is not overwritten.
    """
    print(("\r" if sys.stderr.isatty() else "") + text, end="", file=sys.stderr, flush=True)


def status_on_terminal(text: str) -> None:
    """Like `status`, but writes nothing if standard error is not a terminal."""
    if sys.stderr.isatty():
        status(text)


@contextmanager
def status_while(text: str) -> Iterator[None]:
    """Show a status line while the block runs, on a terminal only; it is wiped afterwards."""
    status_on_terminal(text)
    try:
        yield
    finally:
        wipe_status(len(text))


def wipe_status(width: int) -> None:
    """Wipe a status line of `width` characters, if standard error is a terminal."""
    status_on_terminal(" " * width + "\r")
