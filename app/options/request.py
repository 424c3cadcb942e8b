"""One answer as the command line asks for it: made from the options once, and carried down as it is."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from app.options.draft import Drafting, requested_draft
from app.options.model import OpenModel, open_model
from app.options.options import given_settings
from app.options.prompt import Prompt, room_for_answer
from app.options.prompt_cache import requested_cache
from mlx_llama3.errors import UserError
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.hooks.edits import Scale, edited


class OpenRequest(NamedTuple):
    """A request whose model is loaded: the model under the request's edits, and what `generate` takes."""

    opened: OpenModel
    ids: list[int]
    settings: dict[str, Any]


@dataclass(frozen=True)
class AnswerRequest:
    """What `generate` and `trace` are asked for.

    settings: options of `mlx_llama3.generate` without the draft and the cache.
    """

    model: str
    prompt: Prompt
    context: int | None
    settings: dict[str, Any]
    edits: tuple[Scale, ...]
    draft: Drafting | None
    cache: CacheSettings
    prompt_cache: Path | None

    @classmethod
    def from_args(cls, args: argparse.Namespace, max_tokens: int) -> "AnswerRequest":
        """Read all options. Raises `UserError` for whatever can be refused before a model is loaded.

        max_tokens: the longest answer where the options name none.
        """
        return cls(
            model=args.model,
            settings={"max_tokens": max_tokens} | given_settings(args) | _logprobs(args),
            prompt=Prompt.from_args(args),
            context=args.context,
            edits=tuple(args.scale),
            draft=requested_draft(args) if "draft" in args else None,
            cache=requested_cache(args) if "prompt_cache" in args else CacheSettings(),
            prompt_cache=getattr(args, "prompt_cache", None),
        )

    def open(self) -> OpenRequest:
        """Load the model and encode the prompt; `max_tokens` becomes what the context leaves, if that is less.

        Raises `UserError` for a model that is absent or broken, and for a prompt that does not fit.
        """
        opened = open_model(self.model)
        opened = opened._replace(model=edited(opened.model, self.edits))
        ids = self.prompt.encode(opened.tokenizer)
        longest = min(self.settings["max_tokens"], room_for_answer(opened.model, ids, self.context))
        return OpenRequest(opened, ids, self.settings | {"max_tokens": longest})


def _logprobs(args: argparse.Namespace) -> dict[str, int]:
    if getattr(args, "logprobs", None) is None:
        return {}
    if not args.json or args.logprobs < 0:
        raise UserError("--logprobs N needs --json, and N of at least 0")
    return {"logprobs": args.logprobs}
