"""Answers one prompt and writes the trace of it."""

import argparse
import sys

from app.options.edits import edit_text
from app.options.model import open_model
from app.options.options import given_settings
from app.options.prompt import prompt_ids, prompt_messages, room_for_answer
from mlx_llama3.generation.stream import Step
from mlx_llama3.model.hooks.edits import edited
from mlx_llama3.system.files import check_place
from mlx_llama3.trace.running import run


def record(args: argparse.Namespace, max_tokens: int) -> None:
    """What the options of `trace_command` ask for. What can be refused without the model is refused before it."""
    settings = {"max_tokens": max_tokens} | given_settings(args)
    check_place(args.out)
    messages = prompt_messages(args)
    opened = open_model(args.model)
    ids = prompt_ids(args, messages, opened.tokenizer)
    settings["max_tokens"] = min(settings["max_tokens"], room_for_answer(opened.model, ids, args.context))
    model = edited(opened.model, args.scale)
    trace = run(model, opened.tokenizer, ids, save=args.save, name=opened.name, on_step=_print_text, **settings)
    print()
    trace.settings["edits"] = [edit_text(edit) for edit in args.scale]
    trace.save(args.out)
    kept = ", ".join(dict.fromkeys(["norms", *args.save]))
    print(
        f"{args.out}: {len(trace.tokens)} tokens, {trace.norms.shape[1]} layers, {kept}, "
        f"{args.out.stat().st_size / 1e6:.1f} MB",
        file=sys.stderr,
    )


def _print_text(step: Step) -> None:
    print(step.text, end="", flush=True)
