"""Answers one prompt, as streamed text or as one JSON object."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from app.models import OpenModel, open_model
from app.options import given_settings
from app.plain import read_stdin
from app.stats import Meter, Stats
from mlx_llama3.conversation import context_capacity
from mlx_llama3.errors import UserError
from mlx_llama3.generation import Step, generate
from mlx_llama3.model import Transformer
from mlx_llama3.tokenizer import Tokenizer


def answer(args: argparse.Namespace, max_tokens: int) -> None:
    """Answer what the options of `generate_command` ask. What can be refused without the model is refused before it."""
    settings = {"max_tokens": max_tokens} | given_settings(args) | _logprobs(args)
    messages = _messages(args)
    opened = open_model(args.model)
    ids = _prompt_ids(args, messages, opened.tokenizer)
    settings["max_tokens"] = min(settings["max_tokens"], _room(opened.model, ids, args.context))
    steps, stats = _answer(opened, ids, settings, show=not args.json)
    if args.json:
        print(json.dumps(_as_object(ids, steps, stats), ensure_ascii=False))
    if args.verbose:
        print(stats.lines(), file=sys.stderr)


def _logprobs(args: argparse.Namespace) -> dict[str, int]:
    if args.logprobs is None:
        return {}
    if not args.json or args.logprobs < 0:
        raise UserError("--logprobs N needs --json, and N of at least 0")
    return {"logprobs": args.logprobs}


def _messages(args: argparse.Namespace) -> list[dict[str, Any]] | None:
    """The chat to answer; None if --raw or --ids give the prompt."""
    given = next((name for name in ("messages", "raw", "ids") if getattr(args, name) is not None), None)
    if given and args.system is not None:
        raise UserError(f"--system does not go with --{given}, which says everything itself")
    if given == "messages":
        return read_messages(args.messages)
    if given:
        return None
    text = args.prompt if args.prompt is not None else _stdin_text()
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


def _stdin_text() -> str:
    if sys.stdin.isatty():
        raise UserError("there is no prompt: give --prompt, --messages, --raw or --ids, or text on standard input")
    return "\n".join(read_stdin())


def read_messages(path: Path) -> list[dict[str, Any]]:
    """A list of messages, or an object with one under "messages". Raises `UserError` that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read the messages: {error.strerror}") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"{path} is not JSON: {error}") from error
    messages = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{path} holds no messages; expected [{{"role": "user", "content": "..."}}, ...]')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{path}: message {number} must be an object with role and content")
    return messages


def _prompt_ids(args: argparse.Namespace, messages: list[dict[str, Any]] | None, tokenizer: Tokenizer) -> list[int]:
    if messages is not None:
        return tokenizer.encode_chat(messages)
    if args.ids is not None:
        return args.ids
    return tokenizer.encode(args.raw, bos=True, allow_special=True)


def _room(model: Transformer, ids: list[int], context: int | None) -> int:
    """Tokens that the context leaves for the answer; raises `UserError` if there are none."""
    capacity = context_capacity(model, context)
    if len(ids) >= capacity:
        raise UserError(
            f"the prompt has {len(ids)} tokens, the context holds {capacity}; shorten it, or use a larger context"
        )
    return capacity - len(ids)


def _answer(opened: OpenModel, ids: list[int], settings: dict[str, Any], *, show: bool) -> tuple[list[Step], Stats]:
    """All steps and their speed; the text is printed on the way if it is to be shown."""
    meter, steps = Meter(), []
    for step in generate(opened.model, opened.tokenizer, ids, **settings):
        meter.tick()
        steps.append(step)
        if show:
            print(step.text, end="", flush=True)
    if show:
        print()
    return steps, meter.stats(len(ids))


def _as_object(ids: list[int], steps: list[Step], stats: Stats) -> dict[str, Any]:
    result = {
        "text": "".join(step.text for step in steps),
        "ids": [step.token for step in steps],
        "prompt_ids": ids,
        "finish_reason": steps[-1].finish_reason,
        "stats": stats._asdict(),
    }
    if steps[0].logprob is not None:
        result["logprobs"] = [
            {"id": step.token, "logprob": step.logprob, "top": [list(pair) for pair in step.top_logprobs or []]}
            for step in steps
        ]
    return result
