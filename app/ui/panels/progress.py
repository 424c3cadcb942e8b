"""The progress of long work on another thread, for the events of the page."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any


class Cancelled(Exception):
    """The user cancelled the work; raised inside it, where it reports its progress."""


class Progress:
    """A callback (done, total) for the work, whose values the page reads. `cancel` ends the work at its next call."""

    def __init__(self) -> None:
        self.done = self.total = 0
        self.cancel = threading.Event()

    def __call__(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        if self.cancel.is_set():
            raise Cancelled

    @property
    def share(self) -> float | None:
        """The share done, from 0 to 1; None while the total is unknown."""
        return self.done / self.total if self.total else None


def follow(future: "Future[Any]", pause: float = 0.25) -> Iterator[None]:
    """Yield every `pause` seconds until the future is done."""
    while not future.done():
        yield
        wait([future], timeout=pause)
