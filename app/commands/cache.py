"""`mlx-llama3 cache`: its options. `run` imports the rest, so that `--help` does not import MLX."""

import argparse
from pathlib import Path

from app.options.options import add_cache_options, add_model_options, add_window_option

PLACES = {"user": "the user's message", "system": "the system prompt", "raw": "text without a chat format"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-llama3 cache`."""
    parser.description = (
        "Read a long text once and write its KV cache to a file. generate and chat with --prompt-cache FILE then start "
        "at once where a prompt begins with the same text."
    )
    add_model_options(parser)
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", required=True, help="the text, in UTF-8")
    parser.add_argument(
        "--as",
        dest="place",
        choices=PLACES,
        default="user",
        help="where the text will stand: at the start of the user's first message, in the system prompt, or (raw) "
        "without a chat format (default: user)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="the file to write, a .safetensors")
    add_cache_options(parser)
    add_window_option(parser)


def run(args: argparse.Namespace) -> int:
    """Read the text and write the file. Raises `UserError`."""
    from app.options.prompt_cache import write

    write(args)
    return 0
