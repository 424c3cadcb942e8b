"""One answer as the browser gets it: the engine's steps in few updates, each with the text so far and the speed."""

from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic

from app.stats import Meter
from app.ui.session.mlx_thread import Engine
from app.ui.session.session import Asked, Session

# Gradio sends every update that it is given, and slows nobody down: more than 12 a second fall behind in the browser.
_PAUSE = 1 / 12


class AnswerStopped(Exception):
    """The person pressed Stop while the prompt was being read; ends the generation between two chunks."""


@dataclass
class AnswerProgress:
    """What of an answer is there: its `text`, the prompt's tokens `read` of `to_read`, the speed in tokens a second.

    reason: None while it runs; at the end "stop", "length" or "stopped".
    """

    text: str = ""
    read: int = 0
    to_read: int = 0
    tokens: int = 0
    speed: float = 0.0
    reason: str | None = None


def answer(engine: Engine, session: Session, asked: Asked) -> Iterator[AnswerProgress]:
    """Answer what was asked, until `asked.stop` is set. The same object is yielded again and again.

    If the consumer leaves (a closed tab), the generation stops too. Raises what the generation raises.
    """
    progress, meter = AnswerProgress(), Meter()

    def watch(done: int, total: int) -> None:
        progress.read, progress.to_read = done, total
        if asked.stop.is_set():
            raise AnswerStopped

    stream = engine.stream(session.answer, asked, on_prefill=watch, stop=asked.stop)
    reason, shown, seen = "stopped", 0.0, (0, 0)
    try:
        while not stream.ended:
            for step in stream.take(_PAUSE):
                meter.tick()
                progress.text += step.text
                reason = step.finish_reason or reason
            stats = meter.stats(session.conversation.fed)
            progress.tokens, progress.speed = stats.generation_tokens, stats.generation_tps
            now, there = monotonic(), (progress.tokens, progress.read)
            if not stream.ended and now - shown >= _PAUSE and there != seen:
                shown, seen = now, there
                yield progress
    except AnswerStopped:
        reason = "stopped"
    finally:
        asked.stop.set()
    progress.reason = reason
    yield progress
