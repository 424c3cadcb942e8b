"""Answers a file of prompts, several at a time, and writes the answers in the order of the file."""

import argparse
import hashlib
import json
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
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

# Options for a single answer, which `--batch` refuses.
_ALONE = (
    *("prompt", "messages", "raw", "ids", "json", "logprobs", "scale"),
    *("draft", "draft_tokens", "prompt_cache", "max_kv_size", "kv_bits"),
)


@dataclass(frozen=True)
class BatchRequest:
    """What `generate --batch` is asked for. `size` is the number of prompts at a time, if memory allows."""

    model: str
    context: int | None
    source: Path
    lines: list[BatchLine]
    out: Path
    size: int
    verbose: bool

    @classmethod
    def from_args(cls, args: argparse.Namespace, max_tokens: int) -> "BatchRequest":
        """Read all options and the file of prompts. Raises `UserError` before any model is loaded.

        max_tokens: the longest answer where neither the options nor a line name one.
        """
        _check_options(args)
        lines = read_lines(args.batch, {"max_tokens": max_tokens} | given_settings(args), args.system)
        return cls(args.model, args.context, args.batch, lines, args.out, args.batch_size, args.verbose)


def answer_file(batch: BatchRequest) -> None:
    """Answer all lines, after those that the file of answers holds already. Raises `UserError`."""
    opened = open_model(batch.model)
    requests = [_request(line, opened, batch) for line in batch.lines]
    with AnswerFile(batch.out, _fingerprints(requests, opened)) as output:
        if output.done:
            status(f"{batch.out} holds {output.done} of {len(requests)} answers; going on after them\n")
        _run(opened, batch, requests, output)


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


def _request(line: BatchLine, opened: OpenModel, batch: BatchRequest) -> Request:
    """The request of a line. Raises `UserError` that names the line."""
    names = {each.name for each in fields(Sampling)}
    sampling = Sampling(**{name: value for name, value in line.settings.items() if name in names})
    try:
        check_bias(sampling.logit_bias, opened.model.args.vocab_size)
        ids = opened.tokenizer.encode_chat(line.messages)
        room = min(room_for_answer(opened.model, ids, batch.context), check_prompt(opened.model, ids))
    except UserError as error:
        raise UserError(f"{batch.source}, line {line.number}: {error}") from error
    return Request(ids, min(line.settings["max_tokens"], room), tuple(line.settings.get("stop", ())), sampling)


def _fingerprints(requests: list[Request], opened: OpenModel) -> list[str]:
    """A hash of each request and of the model; equal only where the answers must be equal."""
    model = model_fingerprint(opened.model)

    def of(request: Request) -> str:
        asked = [model, list(request.ids), request.max_tokens, request.stop, repr(request.sampling)]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]

    return [of(request) for request in requests]


def _run(opened: OpenModel, batch: BatchRequest, requests: list[Request], output: AnswerFile) -> None:
    first = output.done
    lines, requests = batch.lines[first:], requests[first:]
    if not requests:
        return
    size = largest_batch(opened.model, requests, batch.size)
    if size < batch.size:
        status(f"memory allows {size} prompts at a time, not {batch.size}\n")
    begin, tokens, early = perf_counter(), 0, {}
    # A count would be printed between the answers where both go to the same terminal.
    counts = sys.stderr.isatty() and str(batch.out) != "-"
    for index, answer in generate_batch(opened.model, opened.tokenizer, requests, batch_size=size):
        early[index] = answer
        tokens += len(answer.tokens)
        while (turn := output.done - first) in early:
            output.write(_as_object(lines[turn], requests[turn], early.pop(turn)))
        if counts:
            status(f"{output.done} of {first + len(lines)} answers" + "\n" * (output.done == first + len(lines)))
    seconds = perf_counter() - begin
    if batch.verbose:
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
