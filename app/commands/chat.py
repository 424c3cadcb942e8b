"""`mlx-llama3 chat`: its options. `run` imports the rest, so that `--help` does not import MLX."""

import argparse
from pathlib import Path

from app.options.options import (
    add_cache_options,
    add_draft_options,
    add_model_options,
    add_prompt_cache_option,
    add_sampling_options,
    add_window_option,
)
from app.options.ranks import add_ranks_options

MAX_TOKENS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-llama3 chat`."""
    parser.description = (
        "Talk with a model in the terminal; /help there lists the commands. In a pipe each line is a message, and the "
        "first error ends it."
    )
    add_model_options(parser)
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with a conversation that /save wrote")
    parser.add_argument(
        "--overflow",
        choices=("stop", "roll"),
        default="stop",
        help="when the context is full: stop and say so, or leave out the oldest messages (default: stop)",
    )
    add_sampling_options(parser, max_tokens=MAX_TOKENS)
    add_draft_options(parser)
    add_cache_options(parser)
    add_window_option(parser)
    add_prompt_cache_option(parser)
    add_ranks_options(parser)


def run(args: argparse.Namespace) -> int:
    """Chat until the end of input. In a pipe each line is a message, and the first error ends it."""
    from app.chat.loop import chat

    chat(args, MAX_TOKENS)
    return 0
