"""`mlx-llama3 trace`: its options. `run` imports the rest, so that `--help` does not import MLX."""

import argparse
from pathlib import Path

from app.options.edits import add_edit_options
from app.options.options import add_model_options, add_prompt_options, add_sampling_options, whole

MAX_TOKENS = 64
SAVE = ("norms", "residuals", "logits", "attention")
POINTS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")


def names(text: str) -> list[str]:
    """Parse `norms,residuals` into a list of what a trace can hold."""
    words = text.split(",")
    for word in words:
        if word not in SAVE:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(SAVE)}")
    return words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-llama3 trace`."""
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, metavar="FILE", help="answer a prompt and write the trace (safetensors)")
    action.add_argument("--show", type=Path, metavar="FILE", help="show a trace that was written")
    parser.add_argument(
        "--save",
        type=names,
        default=["norms"],
        metavar="NAMES",
        help="with --out: what to keep, of norms,residuals,logits,attention (default: norms, which are always there)",
    )
    parser.add_argument(
        "--point", choices=POINTS, default="resid_post", help="with --show: whose norms to draw (default: resid_post)"
    )
    parser.add_argument("--tokens", type=span, metavar="A:B", help="with --show: only positions A up to B")
    add_model_options(parser)
    add_prompt_options(parser)
    add_sampling_options(parser, max_tokens=MAX_TOKENS)
    add_edit_options(parser)


def span(text: str) -> slice:
    """Parse `A:B` into a slice; either may be left out."""
    start, colon, end = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, as in 10:50")
    return slice(whole(start) if start else None, whole(end) if end else None)


def run(args: argparse.Namespace) -> int:
    """Write a trace, or show one."""
    if args.show is not None:
        if any(getattr(args, name) is not None for name in ("prompt", "messages", "raw", "ids")):
            from mlx_llama3.errors import UserError

            raise UserError("--show takes no prompt; write a new trace with --out")
        from app.trace.show import show

        show(args.show, args.point, args.tokens or slice(None))
    else:
        from app.options.request import AnswerRequest
        from app.trace.write import write
        from mlx_llama3.system.files import check_place

        check_place(args.out)
        write(AnswerRequest.from_args(args, MAX_TOKENS), args.out, args.save)
    return 0
