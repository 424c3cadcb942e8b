"""`mlx-llama3 generate`: its options. `run` imports the rest, so that `--help` does not import MLX."""

import argparse
from pathlib import Path

from app.options.edits import add_edit_options
from app.options.options import (
    add_cache_options,
    add_draft_options,
    add_model_options,
    add_prompt_cache_option,
    add_prompt_options,
    add_sampling_options,
    add_window_option,
    positive,
    whole,
)
from app.options.ranks import add_ranks_options

MAX_TOKENS = 256
STANDARD_OUTPUT, BATCH_SIZE = Path("-"), 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-llama3 generate`."""
    parser.description = "Answer one prompt and end. The text is streamed to standard output."
    add_model_options(parser)
    add_prompt_options(parser)
    add_sampling_options(parser, max_tokens=MAX_TOKENS)
    add_edit_options(parser)
    add_draft_options(parser)
    add_cache_options(parser)
    add_window_option(parser)
    add_prompt_cache_option(parser)
    add_ranks_options(parser)
    _add_batch_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object when the answer is complete")
    parser.add_argument(
        "--logprobs",
        type=whole,
        metavar="N",
        help="with --json: how probable each token was, and the N best in its place",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print speeds and memory to standard error")


def _add_batch_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("many prompts at once")
    group.add_argument(
        "--batch",
        type=Path,
        metavar="FILE",
        help='answer a file of prompts (-: standard input), one a line as JSON: "text", or {"prompt": "text"} or '
        '{"messages": [...]} with "id", "system" and options such as "max_tokens" and "seed" of its own',
    )
    group.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=STANDARD_OUTPUT,
        help="where the answers go, a line of JSON each, in order; run again, it goes on where it was interrupted "
        "(default: standard output)",
    )
    group.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        default=BATCH_SIZE,
        help="prompts at a time, as memory allows (default: 8)",
    )


def run(args: argparse.Namespace) -> int:
    """Answer and end."""
    if args.batch is not None:
        from app.generate.batch import BatchRequest, answer_file

        answer_file(BatchRequest.from_args(args, MAX_TOKENS))
        return 0
    from app.generate.one import answer
    from app.options.request import AnswerRequest
    from mlx_llama3.errors import UserError

    if (args.out, args.batch_size) != (STANDARD_OUTPUT, BATCH_SIZE):
        raise UserError("--out and --batch-size need --batch FILE, a file of prompts")
    answer(AnswerRequest.from_args(args, MAX_TOKENS), as_json=args.json, verbose=args.verbose)
    return 0
