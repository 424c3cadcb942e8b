"""An answer arrives as a stream of few updates."""

import threading
import time
from types import SimpleNamespace

import pytest

from app.ui.session.answering import answer
from app.ui.session.mlx_thread import Engine
from app.ui.session.session import ChatRequest
from mlx_llama3.errors import UserError
from mlx_llama3.generation.stream import Step


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.close()


class Speaker:
    """A stand-in for a session: reads a prompt in chunks, then yields `words` steps, one per `pause` seconds."""

    def __init__(self, words: int, pause: float = 0.0, chunks: int = 1, fault: Exception | None = None) -> None:
        self.words, self.pause, self.chunks, self.fault = words, pause, chunks, fault
        self.conversation = SimpleNamespace(fed=10)
        self.closed = threading.Event()
        self.request = ChatRequest(lambda **_: iter(()), [], "")

    def answer(self, _request, *, on_prefill):
        try:
            for chunk in range(self.chunks):
                time.sleep(self.pause)
                on_prefill(chunk + 1, self.chunks)
            for number in range(self.words):
                time.sleep(self.pause)
                yield Step(number, "x", "stop" if number == self.words - 1 else None)
            if self.fault:
                raise self.fault
        finally:
            self.closed.set()


def test_the_whole_text_in_at_most_twelve_updates_a_second(engine):
    speaker, started = Speaker(100, 0.01), time.monotonic()
    updates = [(each.text, each.reason) for each in answer(engine, speaker, speaker.request)]
    seconds = time.monotonic() - started
    assert updates[-1] == ("x" * 100, "stop")
    assert all(reason is None for _, reason in updates[:-1])
    assert 3 <= len(updates) <= 12 * seconds + 2
    lengths = [len(text) for text, _ in updates]
    assert lengths == sorted(lengths)


def test_stop_ends_it_and_keeps_the_text(engine):
    speaker = Speaker(10_000, 0.005)
    for progress in answer(engine, speaker, speaker.request):
        speaker.request.stop.set()
    assert progress.reason == "stopped" and 0 < progress.tokens < 100
    assert speaker.closed.is_set()


def test_stop_while_the_prompt_is_read(engine):
    speaker = Speaker(10, 0.05, chunks=100)
    for progress in answer(engine, speaker, speaker.request):
        assert progress.read >= 1
        speaker.request.stop.set()
    assert progress.reason == "stopped" and progress.text == "" and progress.read < 20


def test_a_consumer_that_leaves_ends_the_generation(engine):
    speaker = Speaker(10_000, 0.005)
    updates = answer(engine, speaker, speaker.request)
    next(updates)
    updates.close()
    assert speaker.request.stop.is_set()
    assert speaker.closed.wait(5)


def test_errors_come_through(engine):
    speaker = Speaker(2, fault=UserError("the weights are damaged"))
    with pytest.raises(UserError, match="damaged"):
        list(answer(engine, speaker, speaker.request))
