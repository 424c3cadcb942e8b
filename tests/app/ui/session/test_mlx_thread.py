"""The MLX thread: order, cancelling, exceptions, closing. The end of a process is tested in a subprocess."""

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from app.ui.session.mlx_thread import Engine

import mlx.core as mx


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.close()


def name() -> str:
    return threading.current_thread().name


def test_everything_runs_on_one_thread(engine):
    def names():
        for _ in range(3):
            yield name()

    assert engine.run(name) == engine.submit(name).result() == "mlx"
    assert list(engine.stream(names)) == ["mlx"] * 3
    assert engine.run(lambda: engine.run(name)) == "mlx"  # a call from the thread itself does not deadlock


def test_arrays_made_there_are_evaluated_there(engine):
    lazy = engine.run(lambda: mx.full((2, 2), 3.0) @ mx.full((2, 2), 2.0))
    assert engine.run(lazy.tolist) == [[12.0, 12.0], [12.0, 12.0]]


def test_arguments_and_exceptions_come_across(engine):
    def fail(number, *, factor):
        raise KeyError(number * factor)

    future = engine.submit(fail, 3, factor=2)
    with pytest.raises(KeyError, match="6"):
        future.result()
    assert engine.run(name) == "mlx"  # the thread still works


def test_a_stream_raises_after_the_items_before(engine):
    def two_then_error():
        yield 1
        yield 2
        raise ValueError("third")

    stream, seen = engine.stream(two_then_error), []
    with pytest.raises(ValueError, match="third"):
        while not stream.ended:
            seen += stream.take()
    assert seen == [1, 2]
    assert stream.ended and stream.take() == []


def test_a_function_that_raises_before_its_first_item(engine):
    def refuse():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        engine.stream(refuse).take()


def test_cancel_closes_the_generator_on_the_thread(engine):
    closed, steps = [], []

    def endless():
        try:
            while True:
                steps.append(1)
                yield len(steps)
        finally:
            closed.append(name())

    stream = engine.stream(endless)
    assert stream.take()[0] == 1
    stream.cancel()
    list(stream)
    made = len(steps)
    assert closed == ["mlx"]
    engine.run(name)
    assert len(steps) == made, "the generator has ended"


def test_stop_may_be_set_before_the_stream_begins(engine):
    stop, begun = threading.Event(), []
    stop.set()

    def never():
        begun.append(1)
        yield 1

    assert list(engine.stream(never, stop=stop)) == []
    assert begun == []


def test_calls_are_answered_between_two_items(engine):
    gate = threading.Semaphore(0)

    def slow():
        for number in range(3):
            gate.acquire()
            yield number

    stream = engine.stream(slow)
    call = engine.submit(name)
    gate.release()
    assert call.result(timeout=10) == "mlx"
    assert stream.take() == [0]
    gate.release(2)
    assert list(stream) == [1, 2]


def test_two_streams_take_turns(engine):
    order, hold = [], threading.Event()

    def three(label):
        for _ in range(3):
            order.append(label)
            yield label

    engine.submit(hold.wait)
    streams = [engine.stream(three, "a"), engine.stream(three, "b")]
    hold.set()
    assert [list(stream) for stream in streams] == [["a"] * 3, ["b"] * 3]
    assert order == ["a", "b"] * 3


def test_take_waits_no_longer_than_its_timeout(engine):
    gate = threading.Event()
    stream = engine.stream(lambda: iter([gate.wait()]))
    assert stream.take(0.05) == [] and not stream.ended
    gate.set()
    assert stream.take() == [True]


def test_close_ends_streams_and_waiting_calls():
    engine, begun, gate, closed = Engine(), threading.Event(), threading.Event(), []

    def endless():
        try:
            while True:
                begun.set()
                gate.wait()
                yield 1
        finally:
            closed.append(name())

    stream = engine.stream(endless)
    begun.wait()
    waiting = engine.submit(name)
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._closing:
        pass
    gate.set()
    closing.join()
    assert closed == ["mlx"] and set(stream) <= {1}
    with pytest.raises(CancelledError):
        waiting.result()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(name)
    with pytest.raises(RuntimeError, match="closed"):
        engine.stream(endless)


LEAVE = """
from app.ui.session.mlx_thread import Engine
import mlx.core as mx
engine = Engine()
def work():
    x = mx.random.normal((256, 256))
    while True:
        x = mx.tanh(x @ x)
        mx.async_eval(x)
        yield x
stream = engine.stream(work)
stream.take()
engine.close()
"""


def test_a_process_may_end_right_after_close():
    for _ in range(5):
        assert subprocess.run([sys.executable, "-c", LEAVE], timeout=60).returncode == 0
