"""Standard input as lines of UTF-8 text."""

import sys
from collections.abc import Iterator

from mlx_llama3.errors import UserError


def read_stdin() -> Iterator[str]:
    """The lines of standard input, without their ends and a byte order mark. Raises `UserError` if it is not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(f"line {number} of standard input is not UTF-8 text") from error
