"""The prompt of a command that runs once: from its options to token ids."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.options.stdin import read_stdin
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import parse_json, read_bytes
from mlx_llama3.tokenizer.messages import PromptError, read_messages

if TYPE_CHECKING:
    from mlx_llama3.model.transformer import Transformer
    from mlx_llama3.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """The prompt of one answer: a chat, or text or token ids to continue. Exactly one of the three is given."""

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    ids: list[int] | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "Prompt":
        """Read it from the options, a file or standard input. Raises `UserError` before any model is loaded."""
        given = next((name for name in ("messages", "raw", "ids") if getattr(args, name) is not None), None)
        if given and args.system is not None:
            raise UserError(f"--system does not go with --{given}, which says everything itself")
        if given == "messages":
            return cls(messages=read_messages_file(args.messages))
        if given:
            return cls(text=args.raw, ids=args.ids)
        message = args.prompt if args.prompt is not None else _stdin_text()
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        return cls(messages=read_messages([*system, {"role": "user", "content": message}]))

    def encode(self, tokenizer: "Tokenizer") -> list[int]:
        """The token ids; control tokens are read as such in text that is given raw."""
        if self.messages is not None:
            return tokenizer.encode_chat(self.messages)
        if self.ids is not None:
            return self.ids
        return tokenizer.encode(self.text, bos=True, allow_special=True)


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
