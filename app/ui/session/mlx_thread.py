"""The MLX thread: all evaluations run on it, one after another; a long one can be stopped.

MLX's streams belong to a thread: evaluating a lazy array on another thread raises. So a program with several threads (a
web server) submits its work to an `Engine`, and gets Python values and NumPy arrays back.
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
    """The items of a generator that runs on the engine's thread, for one consumer on another thread.

    The generator does not wait for its consumer. ended: True after the last item was taken.
    """

    def __init__(self, make: Callable[[], Iterator[T]], stop: threading.Event) -> None:
        self.ended = False
        self._make, self._stop = make, stop
        self._generator: Iterator[T] | None = None
        self._queue: SimpleQueue[tuple[bool, T | BaseException | None]] = SimpleQueue()

    def cancel(self) -> None:
        """Stop the generator: the engine's thread closes it before its next item. Returns at once."""
        self._stop.set()

    def take(self, timeout: float | None = None) -> list[T]:
        """All available items; waits for the first one for up to `timeout` seconds (None: without limit).

        [] after the timeout, or at the end. Raises what the generator raised, once all earlier items were taken.
        """
        items: list[T] = []
        wait, deadline = True, None if timeout is None else monotonic() + timeout
        while not self.ended:
            try:
                more, value = self._queue.get(wait, None if deadline is None else max(0.0, deadline - monotonic()))
            except Empty:
                break
            if not more:
                if items and value is not None:
                    self._queue.put(
                        (more, value)
                    )  # raised by the next call, so that the items before the error are not lost
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
        """Generate one item, on the engine's thread; returns whether there may be another one."""
        try:
            if self._generator is None:
                self._generator = self._make()
            if closing or self._stop.is_set():
                self._generator.close()
                self._queue.put((False, None))
                return False
            self._queue.put((True, next(self._generator)))
            return True
        except StopIteration:
            self._queue.put((False, None))
        except BaseException as error:  # `take` raises it on the consumer's thread
            self._queue.put((False, error))
        return False


class Engine:
    """A thread and its job queue. Waiting calls and other streams run between two items of a stream."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = False
        self._finished = threading.Event()
        self._lock = threading.Lock()  # no job may be queued after `_finish`
        self._thread = threading.Thread(target=self._work, name="mlx", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., T], *args: Any, **keywords: Any) -> "Future[T]":
        """Call `fn` on the thread; the future gets its result or its exception.

        Raises `RuntimeError` if the engine is closed.
        """
        future: Future[T] = Future()

        def job() -> None:
            if self._closing or not future.set_running_or_notify_cancel():
                future.cancel()
                return
            try:
                result = fn(*args, **keywords)
            except BaseException as error:  # future.result() raises it
                future.set_exception(error)
            else:
                future.set_result(result)

        self._put(job)
        return future

    def run(self, fn: Callable[..., T], *args: Any, **keywords: Any) -> T:
        """Call `fn` on the thread and return its result; also works on the thread itself. Raises what `fn` raises."""
        if threading.current_thread() is self._thread:
            return fn(*args, **keywords)
        return self.submit(fn, *args, **keywords).result()

    def stream(
        self, fn: Callable[..., Iterator[T]], *args: Any, stop: threading.Event | None = None, **keywords: Any
    ) -> Stream[T]:
        """Run the generator `fn(*args)` on the thread. Setting `stop` ends it, as `cancel` does.

        Raises `RuntimeError` if the engine is closed.
        """
        stream: Stream[T] = Stream(lambda: fn(*args, **keywords), stop or threading.Event())

        def job() -> None:
            # At the end of the queue: waiting calls (a click in the page) run between two tokens of an answer.
            if stream.advance(self._closing):
                self._jobs.put(job)

        self._put(job)
        return stream

    def close(self) -> None:
        """Close running streams and cancel waiting calls. May be called twice.

        The thread stays idle until the process ends: MLX's thread destructors need Python, and abort the process if the
        interpreter is shutting down.
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
        if not self._jobs.empty():  # a running stream has queued its next item
            self._jobs.put(self._finish)
            return
        mx.synchronize()
        self._finished.set()

    def _work(self) -> None:
        while True:
            self._jobs.get()()
