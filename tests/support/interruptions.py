"""Ctrl-C at every line of a file in turn, to see what it leaves behind."""

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Interruption(KeyboardInterrupt):
    """What is raised here, apart from a person's own Ctrl-C, which ends the tests."""


def interrupted_at_each_line(file: str, make: Callable[[], T], run: Callable[[T], Any]) -> Iterator[T]:
    """What `make` gives after `run` was interrupted in it, once for each line of `file` that it comes by."""
    for place in itertools.count(1):
        state, left = make(), place

        def trace(frame: Any, event: str, _arg: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename != file:
                return None
            left -= event == "line"
            if left == 0 and event == "line":
                raise Interruption
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            run(state)
        except Interruption:
            pass  # as it was meant to be; the caller looks at what is left
        else:
            return
        finally:
            sys.settrace(before)
        yield state
