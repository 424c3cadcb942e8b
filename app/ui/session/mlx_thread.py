"""The one MLX thread: every evaluation happens on it, one after another; long work can be stopped.

MLX's streams belong to a thread: an array that is not evaluated yet raises in another one. So a program with several
threads (a web server) hands its work to an `Engine` and gets Python values and NumPy arrays back.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar

import mlx.core as mx

T = TypeVar("T")


class Stream(Generic[T]):
    """What a generator yields on the engine's thread, for one consumer in any other thread.

    The generator does not wait for its consumer. `ended` is True once everything it made was handed out.
    """

    def __init__(self, make: Callable[[], Iterator[T]], stop: threading.Event) -> None:
        self.ended = False
        self._make, self._stop = make, stop
        self._generator: Iterator[T] | None = None
        self._made: SimpleQueue[tuple[bool, T | BaseException | None]] = SimpleQueue()

    def cancel(self) -> None:
        """Ask the generator to end; it is closed on the engine's thread before its next item. Returns at once."""
        self._stop.set()

    def take(self, timeout: float | None = None) -> list[T]:
        """All items that have come, after waiting for the first at most `timeout` seconds (None: as long as it takes).

        [] if none came, or at the end. Raises what the generator raised, after the items before it were taken.
        """
        items: list[T] = []
        wait, until = True, None if timeout is None else monotonic() + timeout
        while not self.ended:
            try:
                more, value = self._made.get(wait, None if until is None else max(0.0, until - monotonic()))
            except Empty:
                break
            if not more:
                if items and value is not None:
                    self._made.put((more, value))  # next time: what came before the error is not lost
                    break
                self.ended = True
                if value is not None:
                    raise value
                break
            items.append(value)
            wait = False
        return items

    def __iter__(self) -> Iterator[T]:
        while not self.ended:
            yield from self.take()

    def advance(self, closing: bool) -> bool:
        """Make one item, on the engine's thread; returns whether there may be another one."""
        try:
            if self._generator is None:
                self._generator = self._make()
            if closing or self._stop.is_set():
                self._generator.close()
                self._made.put((False, None))
                return False
            self._made.put((True, next(self._generator)))
            return True
        except StopIteration:
            self._made.put((False, None))
        except BaseException as error:  # it is raised where the stream is consumed
            self._made.put((False, error))
        return False


class Engine:
    """A thread and its queue. Between two items of a stream, calls that wait get their turn; streams take turns too."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = False
        self._finished = threading.Event()
        self._lock = threading.Lock()  # no job may slip into the queue behind its end
        self._thread = threading.Thread(target=self._work, name="mlx", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., T], *args: Any, **keywords: Any) -> "Future[T]":
        """Have `fn` called on the thread; the future holds its result or its exception.

        Raises `RuntimeError` if the engine is closed.
        """
        future: Future[T] = Future()

        def job() -> None:
            if self._closing or not future.set_running_or_notify_cancel():
                future.cancel()
                return
            try:
                result = fn(*args, **keywords)
            except BaseException as error:  # it is raised by future.result()
                future.set_exception(error)
            else:
                future.set_result(result)

        self._put(job)
        return future

    def run(self, fn: Callable[..., T], *args: Any, **keywords: Any) -> T:
        """`fn`'s result, computed on the thread, also if this is the thread. Raises what `fn` raises."""
        if threading.current_thread() is self._thread:
            return fn(*args, **keywords)
        return self.submit(fn, *args, **keywords).result()

    def stream(
        self, fn: Callable[..., Iterator[T]], *args: Any, stop: threading.Event | None = None, **keywords: Any
    ) -> Stream[T]:
        """Iterate `fn(*args)`, a generator, on the thread. `stop`, if set from anywhere, ends it as `cancel` does.

        Raises `RuntimeError` if the engine is closed.
        """
        stream: Stream[T] = Stream(lambda: fn(*args, **keywords), stop or threading.Event())

        def job() -> None:
            # Behind the calls that wait: a click is answered in the middle of a long reply.
            if stream.advance(self._closing):
                self._jobs.put(job)

        self._put(job)
        return stream

    def close(self) -> None:
        """End the work: running streams are closed, waiting calls cancelled. May be called twice.

        The thread itself stays, idle, until the process ends: MLX's destructors for an ending thread need Python, and
        abort the process if Python is about to end too.
        """
        with self._lock:
            if not self._closing:
                self._closing = True
                self._jobs.put(self._finish)
        if threading.current_thread() is not self._thread:
            self._finished.wait()

    def _put(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._closing:
                raise RuntimeError("the engine is closed")
            self._jobs.put(job)

    def _finish(self) -> None:
        if not self._jobs.empty():  # a stream that was at work stands behind this
            self._jobs.put(self._finish)
            return
        mx.synchronize()
        self._finished.set()

    def _work(self) -> None:
        while True:
            self._jobs.get()()
