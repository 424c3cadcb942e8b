"""A chat on one screen: the conversation, and the way an answer is streamed."""

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
    """Ctrl-C while the prompt was being read; ends the generation between two chunks."""


class Chat:
    """One conversation on one screen (`Terminal` or `Plain`), and the speed of its last answer."""

    def __init__(self, name: str, conversation: Conversation, screen: Screen) -> None:
        self.name = name
        self.conversation = conversation
        self.screen = screen
        self.last: Stats | None = None

    def status(self) -> str:
        """One line: the model, the use of the context, the speed of the last answer."""
        speed = f" · {self.last.generation_tps:.1f} tokens/s" if self.last and self.last.generation_tps else ""
        return f"{self.name} · {self.conversation.used}/{self.conversation.capacity} tokens of context{speed}"

    def answer(self, ask: Callable[..., Iterator[Step]], *, if_empty: str = "the message is not kept") -> None:
        """Stream what `ask` (the conversation's send or retry) yields; Ctrl-C ends it and keeps what was said.

        if_empty: what becomes of the conversation if nothing was said.
        """
        with self.screen.answering() as stopped:

            def reading(done: int, total: int) -> None:
                if stopped():
                    raise PrefillStopped
                self.screen.reading(done, total)

            steps = ask(on_prefill=reading)
            if dropped := self.conversation.dropped:
                self.screen.note(f"the oldest {dropped} messages were left out to make room")
            meter, said, reason = Meter(), "", "stopped"
            try:
                for step in steps:
                    meter.tick()
                    self.screen.write(step.text)
                    said, reason = said + step.text, step.finish_reason
                    if stopped() and reason is None:
                        steps.close()
                        reason = "stopped"
            except PrefillStopped:
                reason = "stopped"
            finally:
                self.screen.end_answer()
        self.last = meter.stats(self.conversation.fed, self.conversation.draft)
        self._explain_end(reason, said, if_empty)

    def _explain_end(self, reason: str, said: str, if_empty: str) -> None:
        if not said.strip():
            how = "stopped before the answer began" if reason == "stopped" else "the model said nothing"
            self.screen.note(f"{how}; {if_empty}")
        elif reason == "stopped":
            self.screen.note("stopped; what was said is kept")
        elif reason == "length" and self.conversation.used >= self.conversation.capacity:
            self.screen.note("the context is full: the answer ends here")
        elif reason == "length":
            limit = self.conversation.settings["max_tokens"]
            self.screen.note(f"cut off at {limit} tokens; /set max_tokens N allows more")
