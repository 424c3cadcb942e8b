"""What-if edits as text, `3:mlp=0` or `5:head:2=0.5`: the option `--scale`, and how traces and pages name them."""

import argparse
import re
from typing import TYPE_CHECKING

from app.options.options import number

if TYPE_CHECKING:
    from mlx_llama3.model.hooks.edits import Scale

FORM = re.compile(r"(\d+):(attention|mlp|head:(\d+))=(.+)")


def scale_edit(text: str) -> "Scale":
    """Parse `LAYER:BRANCH=FACTOR` for argparse; BRANCH is attention, mlp or head:N."""
    from mlx_llama3.model.hooks.edits import Scale  # here, because --help must not import MLX

    match = FORM.fullmatch(text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYER:BRANCH=FACTOR, as in 3:mlp=0 or 5:head:2=0.5")
    layer, branch, head, factor = match.groups()
    return Scale(int(layer), branch.split(":")[0], number(factor), None if head is None else int(head))


def edit_text(edit: "Scale") -> str:
    """The text that `scale_edit` would parse into `edit`."""
    branch = edit.branch if edit.head is None else f"{edit.branch}:{edit.head}"
    return f"{edit.layer}:{branch}={edit.factor:g}"


def add_edit_options(parser: argparse.ArgumentParser) -> None:
    """Add `--scale`."""
    parser.add_argument(
        "--scale",
        type=scale_edit,
        action="append",
        default=[],
        metavar="L:BRANCH=X",
        help="what if: multiply the update of attention, mlp or head:N of layer L by X, as in 3:mlp=0; repeatable",
    )
