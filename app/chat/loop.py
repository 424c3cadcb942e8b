"""The chat: reads messages, streams answers, keeps the conversation."""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from app.chat import conversation_file
from app.chat.pipe import Plain
from app.chat.slash_commands import NAMES, Exit, find_command
from app.options.draft import asked_draft
from app.options.model import OpenModel, open_model
from app.options.options import given_settings
from app.options.prompt_cache import adopt, asked_cache
from app.stats import Meter, Stats
from mlx_llama3.conversation.conversation import Conversation
from mlx_llama3.errors import UserError
from mlx_llama3.generation.stream import Step
from mlx_llama3.model.cache.settings import CacheSettings

if TYPE_CHECKING:
    from app.chat.terminal import Terminal

Screen: TypeAlias = "Plain | Terminal"


class Stopped(Exception):
    """Ctrl-C while the prompt was being read; ends the generation between two chunks."""


def chat(args: argparse.Namespace, max_tokens: int) -> None:
    """Open what the options of `chat_command` say, and chat; max_tokens is for an answer where nothing else says so.

    Raises `UserError`; on a terminal only until the chat begins.
    """
    settings = given_settings(args)
    saved = conversation_file.read(args.resume) if args.resume else None
    draft, kept = asked_draft(args), asked_cache(args)
    opened = open_model(args.model)
    _check_chat(opened, args.system)
    conversation = _conversation(opened, args, saved, kept)
    adopt(args.prompt_cache, opened, conversation)
    conversation.draft = draft and draft.open(opened)
    conversation.settings = {"max_tokens": max_tokens} | conversation.settings | settings
    Chat(opened.name, conversation, _screen()).run()


def _check_chat(opened: OpenModel, system: str | None) -> None:
    """Raise `UserError` now, not at the first message, for a model that cannot chat or takes no system prompt."""
    head = [{"role": "system", "content": system}] if system else []
    opened.tokenizer.encode_chat([*head, {"role": "user", "content": "?"}])


def _screen() -> Screen:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return Plain()
    from app.chat.terminal import Terminal  # here, because a pipe can do without prompt_toolkit

    return Terminal()


def _conversation(opened: OpenModel, args: argparse.Namespace, saved: str | None, kept: CacheSettings) -> Conversation:
    limits = {"overflow": args.overflow, "max_context": args.context, "cache_settings": kept}
    if saved is None:
        return Conversation(opened.model, opened.tokenizer, system=args.system, **limits)
    conversation = Conversation.from_json(saved, opened.model, opened.tokenizer, source=str(args.resume), **limits)
    if args.system is not None:
        conversation.system = args.system
    return conversation


class Chat:
    """The loop of a chat between one conversation and one screen (`Terminal` or `Plain`)."""

    def __init__(self, name: str, conversation: Conversation, screen: Screen) -> None:
        self.name = name
        self.conversation = conversation
        self.screen = screen
        self.last: Stats | None = None

    def run(self) -> None:
        """Take messages and commands until the end of input or `/exit`."""
        self.screen.welcome(f"{self.name} · context of {self.conversation.capacity} tokens · /help for commands")
        for text in self.screen.messages(self.status, NAMES):
            try:
                if command := find_command(text):
                    command(self)
                else:
                    self.answer(partial(self.conversation.send, text))
            except Exit:
                return
            except UserError as error:
                self.screen.error(error)

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
                    raise Stopped
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
            except Stopped:
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
