"""Simulates Ctrl-C at each line of a file in turn, to test the state that it leaves."""

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Interruption(KeyboardInterrupt):
    """The simulated Ctrl-C; a real one still ends the tests."""


def interrupted_at_each_line(file: str, make: Callable[[], T], run: Callable[[T], Any]) -> Iterator[T]:
    """Yield the state from `make()` after an interrupted `run(state)`, once per line of `file` that it executes."""
    for number in itertools.count(1):
        state, remaining = make(), number

        def trace(frame: Any, event: str, _arg: Any) -> Any:
            nonlocal remaining
            if frame.f_code.co_filename != file:
                return None
            remaining -= event == "line"
            if remaining == 0 and event == "line":
                raise Interruption
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            run(state)
        except Interruption:
            pass  # the caller checks the state
        else:
            return
        finally:
            sys.settrace(previous)
        yield state
