"""Answers one prompt, as streamed text or as one JSON object."""

import json
import sys
from typing import Any

from app.options.model import OpenModel
from app.options.prompt_cache import open_cache, reuse
from app.options.request import AnswerRequest
from app.stats import Meter, Stats, cache_line
from mlx_llama3.generation.stream import Step, generate


def answer(request: AnswerRequest, *, as_json: bool, verbose: bool) -> None:
    """Answer on standard output, with the speeds on standard error if `verbose`. Raises `UserError`."""
    opened, ids, settings = request.open()
    draft = request.draft and request.draft.open(opened)
    cache = open_cache(request.prompt_cache, request.cache, opened, request.prompt.messages)
    new = reuse(request.prompt_cache, cache, ids)
    settings |= {"draft": draft, "cache": cache.layers, "history": cache.ids}
    steps, stats = _answer(opened, new, settings, show=not as_json)
    if as_json:
        print(json.dumps(_as_object(ids, steps, stats), ensure_ascii=False))
    if verbose:
        print(stats.lines(), cache_line(cache.layers, cache.settings), sep="\n", file=sys.stderr)


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
