"""Answers a file of prompts, several at once, in the order of the file."""

import argparse
import hashlib
import json
import os
import sys
from dataclasses import fields
from time import perf_counter
from typing import Any

from app.console import status
from app.generate.batch_input import BatchLine, read_lines
from app.generate.batch_output import AnswerFile
from app.options.model import OpenModel, open_model
from app.options.options import given_settings
from app.options.prompt import room_for_answer
from mlx_llama3.conversation.fingerprint import model_fingerprint
from mlx_llama3.errors import UserError
from mlx_llama3.generation.batch import Answer, Request, generate_batch, largest_batch
from mlx_llama3.generation.sampling import Sampling, check_bias
from mlx_llama3.generation.stream import check_prompt
from mlx_llama3.parallel.rank0 import this_rank0
from mlx_llama3.system.files import check_place

# Options of `generate` for one answer, which a batch has no use for.
_ALONE = (
    *("prompt", "messages", "raw", "ids", "json", "logprobs", "scale"),
    *("draft", "draft_tokens", "prompt_cache", "max_kv_size", "kv_bits"),
)


def answer_file(args: argparse.Namespace, max_tokens: int) -> None:
    """What `generate --batch` does. What can be refused without the model is refused before it is loaded."""
    _check_options(args)
    lines = read_lines(args.batch, {"max_tokens": max_tokens} | given_settings(args), args.system)
    opened = open_model(args.model)
    requests = [_request(line, opened, args) for line in lines]
    with AnswerFile(args.out, _fingerprints(requests, opened)) as output:
        if output.done:
            status(f"{args.out} holds {output.done} of {len(lines)} answers; going on after them\n")
        _run(opened, lines, requests, output, args)


def _check_options(args: argparse.Namespace) -> None:
    for name in _ALONE:
        value = getattr(args, name, None)
        if value is not None and value is not False and value != []:  # 0 is an answer too
            raise UserError(f"--batch does not go with --{name.replace('_', '-')}; leave one of them out")
    if this_rank0() is not None:
        raise UserError("--batch runs in one process; start it without mlx.launch")
    if str(args.out) != "-":
        check_place(args.out)
        if args.out.exists() and os.path.exists(args.batch) and args.out.samefile(args.batch):
            raise UserError(f"--out {args.out} is the file of prompts itself; choose another name")


def _request(line: BatchLine, opened: OpenModel, args: argparse.Namespace) -> Request:
    """What a line asks for; raises `UserError` that names the line."""
    names = {each.name for each in fields(Sampling)}
    sampling = Sampling(**{name: value for name, value in line.settings.items() if name in names})
    try:
        check_bias(sampling.logit_bias, opened.model.args.vocab_size)
        ids = opened.tokenizer.encode_chat(line.messages)
        room = min(room_for_answer(opened.model, ids, args.context), check_prompt(opened.model, ids))
    except UserError as error:
        raise UserError(f"{args.batch}, line {line.number}: {error}") from error
    return Request(ids, min(line.settings["max_tokens"], room), tuple(line.settings.get("stop", ())), sampling)


def _fingerprints(requests: list[Request], opened: OpenModel) -> list[str]:
    """Of each request and the model it is for: alike only if the answer is to be the same."""
    model = model_fingerprint(opened.model)

    def of(request: Request) -> str:
        asked = [model, list(request.ids), request.max_tokens, request.stop, repr(request.sampling)]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]

    return [of(request) for request in requests]


def _run(
    opened: OpenModel, lines: list[BatchLine], requests: list[Request], output: AnswerFile, args: argparse.Namespace
) -> None:
    first = output.done
    lines, requests = lines[first:], requests[first:]
    if not requests:
        return
    size = largest_batch(opened.model, requests, args.batch_size)
    if size < args.batch_size:
        status(f"memory allows {size} prompts at a time, not {args.batch_size}\n")
    begin, tokens, early = perf_counter(), 0, {}
    # On a terminal that shows the answers themselves there is no place for a count of them.
    counts = sys.stderr.isatty() and str(args.out) != "-"
    for index, answer in generate_batch(opened.model, opened.tokenizer, requests, batch_size=size):
        early[index] = answer
        tokens += len(answer.tokens)
        while (turn := output.done - first) in early:
            output.write(_as_object(lines[turn], requests[turn], early.pop(turn)))
        if counts:
            status(f"{output.done} of {first + len(lines)} answers" + "\n" * (output.done == first + len(lines)))
    seconds = perf_counter() - begin
    if args.verbose:
        status(f"{len(requests)} answers, {tokens} tokens, {tokens / seconds:.1f} tokens/s, {size} at a time\n")


def _as_object(line: BatchLine, request: Request, answer: Answer) -> dict[str, Any]:
    named = {} if line.id is None else {"id": line.id}
    return {
        "line": line.number,
        **named,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(request.ids),
        "tokens": len(answer.tokens),
    }
