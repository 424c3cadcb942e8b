"""The prompt of a command that runs once: from its options to the ids they stand for."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.options.stdin import read_stdin
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import parse_json, read_bytes
from mlx_llama3.tokenizer.messages import PromptError, read_messages

if TYPE_CHECKING:
    from mlx_llama3.model.transformer import Transformer
    from mlx_llama3.tokenizer.tokenizer import Tokenizer


def prompt_messages(args: argparse.Namespace) -> list[dict[str, Any]] | None:
    """The chat to answer; None if --raw or --ids give the prompt. What is wrong is refused before a model is loaded."""
    given = next((name for name in ("messages", "raw", "ids") if getattr(args, name) is not None), None)
    if given and args.system is not None:
        raise UserError(f"--system does not go with --{given}, which says everything itself")
    if given == "messages":
        return read_messages_file(args.messages)
    if given:
        return None
    text = args.prompt if args.prompt is not None else _stdin_text()
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return read_messages([*system, {"role": "user", "content": text}])


def prompt_ids(args: argparse.Namespace, messages: list[dict[str, Any]] | None, tokenizer: "Tokenizer") -> list[int]:
    """The ids of what the options ask for; `messages` are those of `prompt_messages`."""
    if messages is not None:
        return tokenizer.encode_chat(messages)
    if args.ids is not None:
        return args.ids
    return tokenizer.encode(args.raw, bos=True, allow_special=True)


def room_for_answer(model: "Transformer", ids: list[int], context: int | None) -> int:
    """Tokens that the context leaves for the answer; raises `UserError` if there are none."""
    from mlx_llama3.conversation.conversation import context_capacity  # here, because --help must not import MLX

    capacity = context_capacity(model, context)
    if len(ids) >= capacity:
        raise UserError(
            f"the prompt has {len(ids)} tokens, the context holds {capacity}; shorten it, or use a larger context"
        )
    return capacity - len(ids)


def read_messages_file(path: Path) -> list[dict[str, Any]]:
    """A list of messages, or an object with one under "messages". Raises `UserError` that names the file."""
    content = parse_json(read_bytes(path), path)
    messages = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{path} holds no messages; expected [{{"role": "user", "content": "..."}}, ...]')
    try:
        return read_messages(messages)
    except PromptError as error:
        raise UserError(f"{path}: {error}") from error


def _stdin_text() -> str:
    text = "" if sys.stdin.isatty() else "\n".join(read_stdin())
    if not text.strip():
        raise UserError("there is no prompt: give --prompt, --messages, --raw or --ids, or text on standard input")
    return text
