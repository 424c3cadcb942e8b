"""Answers one prompt, as streamed text or as one JSON object."""

import argparse
import json
import sys
from typing import Any

from app.options.draft import requested_draft
from app.options.model import OpenModel, open_model
from app.options.options import given_settings
from app.options.prompt import prompt_ids, prompt_messages, room_for_answer
from app.options.prompt_cache import open_cache, requested_cache, reuse
from app.stats import Meter, Stats, cache_line
from mlx_llama3.errors import UserError
from mlx_llama3.generation.stream import Step, generate
from mlx_llama3.model.hooks.edits import edited


def answer(args: argparse.Namespace, max_tokens: int) -> None:
    """Answer what the options of `generate_command` ask. What can be refused without the model is refused before it."""
    settings = {"max_tokens": max_tokens} | given_settings(args) | _logprobs(args)
    messages, draft, kept = prompt_messages(args), requested_draft(args), requested_cache(args)
    opened = open_model(args.model)
    opened = opened._replace(model=edited(opened.model, args.scale))
    ids = prompt_ids(args, messages, opened.tokenizer)
    settings["max_tokens"] = min(settings["max_tokens"], room_for_answer(opened.model, ids, args.context))
    settings["draft"] = draft and draft.open(opened)
    held = open_cache(args.prompt_cache, kept, opened, messages)
    new, context = reuse(args.prompt_cache, held, ids), {"cache": held.layers, "history": held.ids}
    steps, stats = _answer(opened, new, settings | context, show=not args.json)
    if args.json:
        print(json.dumps(_as_object(ids, steps, stats), ensure_ascii=False))
    if args.verbose:
        print(stats.lines(), cache_line(held.layers, held.settings), sep="\n", file=sys.stderr)


def _logprobs(args: argparse.Namespace) -> dict[str, int]:
    if args.logprobs is None:
        return {}
    if not args.json or args.logprobs < 0:
        raise UserError("--logprobs N needs --json, and N of at least 0")
    return {"logprobs": args.logprobs}


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
    return steps, meter.stats(len(ids), settings["draft"])


def _as_object(ids: list[int], steps: list[Step], stats: Stats) -> dict[str, Any]:
    result = {
        "text": "".join(step.text for step in steps),
        "ids": [step.token for step in steps],
        "prompt_ids": ids,
        "finish_reason": steps[-1].finish_reason,
        "stats": stats.as_object(),
    }
    if steps[0].logprob is not None:
        result["logprobs"] = [
            {"id": step.token, "logprob": step.logprob, "top": [list(pair) for pair in step.top_logprobs or []]}
            for step in steps
        ]
    return result
