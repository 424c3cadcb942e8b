"""The slash commands of the chat: `/help`, `/set` and the others."""

import difflib
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from app.chat.session import Chat
from app.options.options import SETTINGS, check_settings
from app.stats import cache_line
from mlx_llama3.conversation.conversation import OVERFLOW_POLICIES, Conversation
from mlx_llama3.conversation.saved import write_file
from mlx_llama3.errors import UserError
from mlx_llama3.generation.sampling import Sampling
from mlx_llama3.system.files import read_text


class Exit(Exception):
    """Raised by `/exit` to end the chat."""


def show_help(chat: Chat, _argument: str) -> None:
    """List the commands and keys."""
    width = max(len(f"{name} {command.usage}") for name, command in COMMANDS.items())
    lines = [f"{f'{name} {command.usage}':{width}}  {command.summary}" for name, command in COMMANDS.items()]
    lines += [
        "",
        'Enter sends; Alt-Enter, or \\ at the end of a line, begins another; """ opens and closes a block of lines.',
        "Ctrl-C stops an answer; at an empty prompt Ctrl-C or Ctrl-D leaves. A space before / makes it a message.",
    ]
    chat.screen.show("\n".join(lines))


def system(chat: Chat, argument: str) -> None:
    """Show or change the system prompt."""
    if argument:
        chat.conversation.system = None if argument == '""' else argument
    prompt = chat.conversation.system
    chat.screen.show(f"system prompt: {prompt}" if prompt else "no system prompt is set")


def reset(chat: Chat, _argument: str) -> None:
    """Delete the messages; the system prompt stays."""
    chat.conversation.reset()
    chat.screen.show("all messages are forgotten" + ("; the system prompt stays" if chat.conversation.system else ""))


def undo(chat: Chat, _argument: str) -> None:
    """Remove the last message and its answer."""
    message = chat.conversation.undo()
    chat.screen.show(f"taken back: {message}")


def retry(chat: Chat, _argument: str) -> None:
    """Answer the last message again."""
    chat.answer(chat.conversation.retry, if_empty="the answer before is kept")
    settings = chat.conversation.settings
    if settings.get("temperature", 0) == 0:
        chat.screen.note("temperature is 0, so every answer is the same; /set temperature 0.7 varies them")
    elif settings.get("seed") is not None:
        chat.screen.note("the seed is fixed, so every answer is the same; /set seed default varies them")


def save(chat: Chat, argument: str) -> None:
    """Write the conversation to a file."""
    path = _path(argument, "save")
    write_file(path, chat.conversation.to_json())
    chat.screen.show(f"saved {len(chat.conversation.messages)} messages to {path}")


def load(chat: Chat, argument: str) -> None:
    """Replace the conversation with a saved one."""
    path = _path(argument, "load")
    old = chat.conversation
    chat.conversation = Conversation.from_json(
        read_text(path),
        old.model,
        old.tokenizer,
        source=str(path),
        overflow=old.overflow,
        max_context=old.capacity,
        draft=old.draft,
        cache_settings=old.cache_settings,
    )
    chat.conversation.settings = {"max_tokens": old.settings.get("max_tokens")} | chat.conversation.settings
    chat.screen.show(f"loaded {len(chat.conversation.messages)} messages from {path}; {_usage(chat.conversation)}")


def set_option(chat: Chat, argument: str) -> None:
    """Show the settings, or change one."""
    name, _, text = argument.partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    if not name:
        chat.screen.show("\n".join(f"{key:18} {value}" for key, value in _all_settings(chat.conversation).items()))
    elif name == "overflow":
        _set_overflow(chat.conversation, text)
        chat.screen.show(f"overflow {text}")
    elif name in SETTINGS:
        chat.conversation.settings = _changed(chat.conversation.settings, name, text)
        chat.screen.show(f"{name} {_all_settings(chat.conversation)[name]}")
    else:
        raise UserError(f"there is no setting {name!r}{_suggestion(name, [*SETTINGS, 'overflow'])}; /set shows all")


def stats(chat: Chat, _argument: str) -> None:
    """Show the speed of the last answer and the memory."""
    if chat.last is None:
        raise UserError("there is no answer yet to measure")
    cache = cache_line(chat.conversation.cache, chat.conversation.cache_settings)
    chat.screen.show(f"{chat.last.lines()}\n{cache}")


def context(chat: Chat, _argument: str) -> None:
    """Show how full the context is."""
    chat.screen.show(f"{_usage(chat.conversation)}; when it is full: {chat.conversation.overflow}")


def leave(_chat: Chat, _argument: str) -> None:
    """End the chat."""
    raise Exit


class Command(NamedTuple):
    """A slash command: its function, and its line in `/help`."""

    run: Callable[[Chat, str], None]
    usage: str
    summary: str


COMMANDS = {
    "/help": Command(show_help, "", "this list"),
    "/system": Command(system, "[TEXT]", 'show or change the system prompt ("" removes it)'),
    "/reset": Command(reset, "", "forget the messages, keep the system prompt"),
    "/undo": Command(undo, "", "take the last message and its answer back"),
    "/retry": Command(retry, "", "answer the last message again"),
    "/save": Command(save, "FILE", "save the conversation"),
    "/load": Command(load, "FILE", "go on with a saved conversation"),
    "/set": Command(set_option, "[NAME VALUE]", "show the settings or change one"),
    "/stats": Command(stats, "", "speed of the last answer, memory"),
    "/context": Command(context, "", "how full the context is"),
    "/exit": Command(leave, "", "leave (also /bye, /quit)"),
}
SYNONYMS = {"/bye": "/exit", "/quit": "/exit", "/?": "/help"}
NAMES = [*COMMANDS, *SYNONYMS]


def find_command(text: str) -> Callable[[Chat], None] | None:
    """The command in `text`, or None if it is a message, such as `/etc/hosts is ...` or ` /x`.

    Raises `UserError` for an unknown command; the message suggests the closest one.
    """
    match = re.fullmatch(r"(/[A-Za-z?]+)(?:\s+(.*))?", text.rstrip(), re.DOTALL)
    if match is None:
        return None
    name, argument = match[1].lower(), match[2] or ""
    command = COMMANDS.get(SYNONYMS.get(name, name))
    if command is None:
        raise UserError(f"there is no command {name}{_suggestion(name, NAMES)}; /help lists them")
    if argument and not command.usage:
        raise UserError(f"{name} takes nothing after it")
    return lambda chat: command.run(chat, argument)


def _suggestion(name: str, names: list[str]) -> str:
    match = difflib.get_close_matches(name, names, 1)
    return f", did you mean {match[0]}?" if match else ""


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise UserError(f"name the file: /{command} FILE")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:  # ~name, and there is no such user
        raise UserError(f"{argument}: there can be no such file: {error}") from error


def _usage(conversation: Conversation) -> str:
    used, capacity = conversation.used, conversation.capacity
    share = f"{used} of {capacity} tokens ({used / capacity:.0%})"
    return f"{share} in {len(conversation.messages)} messages"


def _all_settings(conversation: Conversation) -> dict[str, object]:
    """All settings and their values, including defaults; "none" for an empty one."""
    values = {"max_tokens": None, "stop": []} | asdict(Sampling()) | conversation.settings
    values["overflow"] = conversation.overflow
    return {name: "none" if value in (None, [], {}) else value for name, value in values.items()}


def _changed(settings: dict[str, object], name: str, text: str) -> dict[str, object]:
    if text == "default" and name != "max_tokens":
        return {key: value for key, value in settings.items() if key != name}
    try:
        changed = settings | {name: SETTINGS[name].parse(text)}
    except ArgumentTypeError as error:
        raise UserError(f"{name}: {error}; as in /set {name} {SETTINGS[name].metavar}") from error
    check_settings(changed)
    return changed


def _set_overflow(conversation: Conversation, text: str) -> None:
    if text not in OVERFLOW_POLICIES:
        raise UserError(f"overflow is {text!r}; it must be one of {', '.join(OVERFLOW_POLICIES)}")
    conversation.overflow = text
