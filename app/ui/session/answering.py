"""Streams one answer to the browser in few updates, each with the text and speed so far."""

from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic

from app.stats import Meter
from app.ui.session.mlx_thread import Engine
from app.ui.session.session import ChatRequest, Session

# Seconds between updates. Gradio sends every update without back-pressure; the browser cannot keep up with more.
_PAUSE = 1 / 12


class AnswerStopped(Exception):
    """Stop was pressed during the prefill; raised between two chunks to end the generation."""


@dataclass
class AnswerProgress:
    """The state of a running answer.

    text: the text so far. read, to_read: tokens of the prompt that are read, and in all. tokens: generated so far.
    speed: tokens per second. reason: None while it runs; at the end "stop", "length" or "stopped".
    """

    text: str = ""
    read: int = 0
    to_read: int = 0
    tokens: int = 0
    speed: float = 0.0
    reason: str | None = None


def answer(engine: Engine, session: Session, request: ChatRequest) -> Iterator[AnswerProgress]:
    """Answer a request until `request.stop` is set. Every update yields the same object.

    Closing this generator (a closed tab) stops the generation. Raises what the generation raises.
    """
    progress, meter = AnswerProgress(), Meter()

    def on_prefill(done: int, total: int) -> None:
        progress.read, progress.to_read = done, total
        if request.stop.is_set():
            raise AnswerStopped

    stream = engine.stream(session.answer, request, on_prefill=on_prefill, stop=request.stop)
    reason, sent_at, sent = "stopped", 0.0, (0, 0)
    try:
        while not stream.ended:
            for step in stream.take(_PAUSE):
                meter.tick()
                progress.text += step.text
                reason = step.finish_reason or reason
            stats = meter.stats(session.conversation.fed)
            progress.tokens, progress.speed = stats.generation_tokens, stats.generation_tps
            now, state = monotonic(), (progress.tokens, progress.read)
            if not stream.ended and now - sent_at >= _PAUSE and state != sent:
                sent_at, sent = now, state
                yield progress
    except AnswerStopped:
        reason = "stopped"
    finally:
        request.stop.set()
    progress.reason = reason
    yield progress
