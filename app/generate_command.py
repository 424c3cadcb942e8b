"""`mlx-llama3 generate`: its options. The rest is imported when it runs, so that `--help` costs no import of MLX."""

import argparse
from pathlib import Path

from app.options import add_model_options, add_sampling_options, utf8, whole

MAX_TOKENS = 256


def token_ids(text: str) -> list[int]:
    """`1,2,3` as ids."""
    return [whole(word) for word in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mlx-llama3 generate`."""
    add_model_options(parser)
    prompt = parser.add_argument_group("the prompt (without any: standard input is the message)")
    prompt = prompt.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", type=utf8, metavar="TEXT", help="one message of the user")
    prompt.add_argument(
        "--messages", type=Path, metavar="FILE", help='a chat as JSON: [{"role": "user", "content": "..."}, ...]'
    )
    prompt.add_argument("--raw", type=utf8, metavar="TEXT", help="text to continue, without a chat format")
    prompt.add_argument("--ids", type=token_ids, metavar="1,2,3", help="token ids to continue")
    add_sampling_options(parser, max_tokens=MAX_TOKENS)
    parser.add_argument("--json", action="store_true", help="print one JSON object when the answer is complete")
    parser.add_argument("--logprobs", type=whole, metavar="N", help="with --json: of each token and the N best instead")
    parser.add_argument("-v", "--verbose", action="store_true", help="print speeds and memory to standard error")


def run(args: argparse.Namespace) -> int:
    """Answer and end."""
    from app.generate import answer

    answer(args, MAX_TOKENS)
    return 0
