"""Answers one prompt and writes its trace."""

import sys
from collections.abc import Sequence
from pathlib import Path

from app.options.edits import edit_text
from app.options.request import AnswerRequest
from mlx_llama3.generation.stream import Step
from mlx_llama3.trace.running import run


def write(request: AnswerRequest, out: Path, save: Sequence[str]) -> None:
    """Answer on standard output; write the trace to `out`, with the norms and the tensors named in `save`.

    Raises `UserError`.
    """
    opened, ids, settings = request.open()
    trace = run(opened.model, opened.tokenizer, ids, save=save, name=opened.name, on_step=_print_text, **settings)
    print()
    trace.settings["edits"] = [edit_text(edit) for edit in request.edits]
    trace.save(out)
    contents = ", ".join(dict.fromkeys(["norms", *save]))
    print(
        f"{out}: {len(trace.tokens)} tokens, {trace.norms.shape[1]} layers, {contents}, "
        f"{out.stat().st_size / 1e6:.1f} MB",
        file=sys.stderr,
    )


def _print_text(step: Step) -> None:
    print(step.text, end="", flush=True)
