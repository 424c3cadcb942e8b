"""Speculative decoding on the command line: `--draft` and `--draft-tokens`."""

import argparse
from pathlib import Path
from typing import NamedTuple

from app.console import status_while
from app.options.model import OpenModel, find_model
from mlx_llama3.api import NGRAM, load_draft_folder, ngram_draft
from mlx_llama3.errors import UserError
from mlx_llama3.generation.speculative.speculation import Speculation, check_tokens


class Drafting(NamedTuple):
    """The drafter that `--draft` names, and the most tokens of a draft (`--draft-tokens`; None: the default)."""

    name: str
    tokens: int | None

    @property
    def needs_model(self) -> bool:
        """Whether the drafter is a second model."""
        return self.name != NGRAM

    def open(self, opened: OpenModel) -> Speculation:
        """Make the drafter for an open model; fetch and load a draft model. Raises `UserError` as `load_draft` does."""
        if not self.needs_model:
            return ngram_draft(self.tokens)
        title, folder = find_model(self.name)
        with status_while(f"Loading {title} ..."):
            return self.load(opened, folder)

    def load(self, opened: OpenModel, folder: Path) -> Speculation:
        """Make the drafter from the folder of a draft model. Raises `UserError` as `load_draft` does."""
        return load_draft_folder(folder, opened.model, opened.tokenizer, tokens=self.tokens)


def requested_draft(args: argparse.Namespace) -> Drafting | None:
    """Read the options; None without `--draft`. Raises `UserError` before any model is loaded."""
    if args.draft is None:
        if args.draft_tokens is not None:
            raise UserError("--draft-tokens needs --draft: a smaller model, or ngram")
        return None
    if args.draft_tokens is not None:
        check_tokens(args.draft_tokens, "--draft-tokens")
    return Drafting(args.draft, args.draft_tokens)
