"""A chat session: one conversation on one screen, and the streaming of its answers."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from app.chat.pipe import Plain
from app.stats import Meter, Stats
from mlx_llama3.conversation.conversation import Conversation
from mlx_llama3.generation.stream import Step

if TYPE_CHECKING:
    from app.chat.terminal import Terminal

Screen: TypeAlias = "Plain | Terminal"


class PrefillStopped(Exception):
    """Ctrl-C was pressed during the prefill; raised between two chunks to end the generation."""


class Chat:
    """One conversation on one screen (`Terminal` or `Plain`). last: the statistics of the last answer."""

    def __init__(self, name: str, conversation: Conversation, screen: Screen) -> None:
        self.name = name
        self.conversation = conversation
        self.screen = screen
        self.last: Stats | None = None

    def status(self) -> str:
        """One line: the model, the tokens of context in use, the speed of the last answer."""
        speed = f" · {self.last.generation_tps:.1f} tokens/s" if self.last and self.last.generation_tps else ""
        return f"{self.name} · {self.conversation.used}/{self.conversation.capacity} tokens of context{speed}"

    def answer(self, ask: Callable[..., Iterator[Step]], *, if_empty: str = "the message is not kept") -> None:
        """Stream the steps of `ask`, the conversation's `send` or `retry`. Ctrl-C ends the answer and keeps its text.

        if_empty: the note for an answer without text, which leaves the conversation unchanged.
        """
        with self.screen.answering() as stopped:

            def reading(done: int, total: int) -> None:
                if stopped():
                    raise PrefillStopped
                self.screen.reading(done, total)

            steps = ask(on_prefill=reading)
            if dropped := self.conversation.dropped:
                self.screen.note(f"the oldest {dropped} messages were left out to make room")
            meter, text, reason = Meter(), "", "stopped"
            try:
                for step in steps:
                    meter.tick()
                    self.screen.write(step.text)
                    text, reason = text + step.text, step.finish_reason
                    if stopped() and reason is None:
                        steps.close()
                        reason = "stopped"
            except PrefillStopped:
                reason = "stopped"
            finally:
                self.screen.end_answer()
        self.last = meter.stats(self.conversation.fed, self.conversation.draft)
        self._explain_end(reason, text, if_empty)

    def _explain_end(self, reason: str, text: str, if_empty: str) -> None:
        if not text.strip():
            cause = "stopped before the answer began" if reason == "stopped" else "the model said nothing"
            self.screen.note(f"{cause}; {if_empty}")
        elif reason == "stopped":
            self.screen.note("stopped; what was said is kept")
        elif reason == "length" and self.conversation.used >= self.conversation.capacity:
            self.screen.note("the context is full: the answer ends here")
        elif reason == "length":
            limit = self.conversation.settings["max_tokens"]
            self.screen.note(f"cut off at {limit} tokens; /set max_tokens N allows more")
