"""The chat loop: reads messages and slash commands, and streams answers."""

import argparse
import sys
from functools import partial

from app.chat.pipe import Plain
from app.chat.session import Chat, Screen
from app.chat.slash_commands import NAMES, Exit, find_command
from app.options.draft import requested_draft
from app.options.model import OpenModel, open_model
from app.options.options import given_settings
from app.options.prompt_cache import adopt, requested_cache
from mlx_llama3.conversation.conversation import Conversation
from mlx_llama3.errors import UserError
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.system.files import read_text


def chat(args: argparse.Namespace, max_tokens: int) -> None:
    """Open the model and conversation of the options of `commands/chat.py`, and chat.

    max_tokens: the default length limit of an answer. Raises `UserError`; on a terminal only until the chat begins.
    """
    settings = given_settings(args)
    saved = read_text(args.resume) if args.resume else None
    draft, cache_settings = requested_draft(args), requested_cache(args)
    opened = open_model(args.model)
    _check_chat(opened, args.system)
    conversation = _conversation(opened, args, saved, cache_settings)
    adopt(args.prompt_cache, opened, conversation)
    conversation.draft = draft and draft.open(opened)
    conversation.settings = {"max_tokens": max_tokens} | conversation.settings | settings
    run(Chat(opened.name, conversation, _screen()))


def _check_chat(opened: OpenModel, system: str | None) -> None:
    """Raise `UserError` for a model that cannot chat, or takes no system prompt: now, not at the first message."""
    head = [{"role": "system", "content": system}] if system else []
    opened.tokenizer.encode_chat([*head, {"role": "user", "content": "?"}])


def _screen() -> Screen:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return Plain()
    from app.chat.terminal import Terminal  # here, because a pipe does not need prompt_toolkit

    return Terminal()


def _conversation(
    opened: OpenModel, args: argparse.Namespace, saved: str | None, cache_settings: CacheSettings
) -> Conversation:
    limits = {"overflow": args.overflow, "max_context": args.context, "cache_settings": cache_settings}
    if saved is None:
        return Conversation(opened.model, opened.tokenizer, system=args.system, **limits)
    conversation = Conversation.from_json(saved, opened.model, opened.tokenizer, source=str(args.resume), **limits)
    if args.system is not None:
        conversation.system = args.system
    return conversation


def run(chat: Chat) -> None:
    """Handle messages and slash commands until the end of input or `/exit`."""
    chat.screen.welcome(f"{chat.name} · context of {chat.conversation.capacity} tokens · /help for commands")
    for text in chat.screen.messages(chat.status, NAMES):
        try:
            if command := find_command(text):
                command(chat)
            else:
                chat.answer(partial(chat.conversation.send, text))
        except Exit:
            return
        except UserError as error:
            chat.screen.error(error)
