"""Prompt caches on disk: made by `mlx-llama3 cache`, used by `--prompt-cache`."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.console import status_on_terminal
from app.options.model import OpenModel, open_model
from app.options.options import cache_settings, option
from app.options.prompt import room_for_answer
from mlx_llama3.conversation import prompt_cache
from mlx_llama3.conversation.conversation import Conversation
from mlx_llama3.conversation.system_prefix import keep_system_prefix, system_prefix
from mlx_llama3.errors import UserError
from mlx_llama3.generation.decoding import prefill
from mlx_llama3.model.cache.prefix import PrefixCache, common_length
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.system.files import read_some_text
from mlx_llama3.tokenizer.tokenizer import Tokenizer

import mlx.core as mx


def write(args: argparse.Namespace) -> None:
    """Run `mlx-llama3 cache`. Raises `UserError`, before the model is loaded wherever that is possible."""
    if args.system is not None and args.place != "user":
        raise UserError(f"--system does not go with --as {args.place}, which says everything itself")
    prompt_cache.check_writable(args.out)
    text, settings = read_some_text(args.prompt_file), cache_settings(args)
    opened = open_model(args.model)
    ids = beginning(opened.tokenizer, text, args.place, args.system)
    room_for_answer(opened.model, ids, args.context)
    if args.place != "raw":
        settings = keep_system_prefix(settings, opened.tokenizer, text if args.place == "system" else args.system)
    cache = PrefixCache(opened.model.make_cache(settings), settings)
    with _ended_at_once():
        mx.eval(prefill(opened.model, ids, cache.layers, on_prefill=_reading), [layer.state for layer in cache.layers])
    cache.set_ids(ids)
    prompt_cache.save(args.out, cache, opened.model, opened.tokenizer, name=opened.name)
    print(f"{args.out}: {len(ids)} tokens, {args.out.stat().st_size / 1e6:.1f} MB")


@contextmanager
def _ended_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process itself. Python would notice it only after a chunk of the prompt, which takes seconds.

    No file is written within, so nothing is left half done.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # background jobs of a shell ignore SIGINT, and go on ignoring it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def beginning(tokenizer: Tokenizer, text: str, place: str, system: str | None) -> list[int]:
    """The token ids that all prompts share which begin with `text` in this place, whatever follows."""
    if place == "raw":
        return tokenizer.encode(text, bos=True)
    if place == "system":
        return system_prefix(tokenizer, text)
    before = [{"role": "system", "content": system}] if system else []
    prompts = [tokenizer.encode_chat([*before, {"role": "user", "content": text + more}]) for more in ("", "\n?")]
    return prompts[0][: common_length(*prompts)]


def requested_cache(args: argparse.Namespace) -> CacheSettings:
    """Cache settings from the command line. Raises `UserError` before any model is loaded."""
    if args.prompt_cache is not None:
        if getattr(args, "scale", None):
            raise UserError("--prompt-cache does not go with --scale: an edit changes keys and values")
        prompt_cache.check(args.prompt_cache)
    return cache_settings(args)


def open_cache(
    path: Path | None, settings: CacheSettings, opened: OpenModel, messages: list[dict[str, Any]] | None
) -> PrefixCache:
    """The cache from the file `path`, or an empty one with `settings`, for an answer to `messages` (None: plain text).

    A window never loses the system prompt of `messages`.
    """
    if path is not None:
        return _load(path, opened, settings)
    if messages is not None:
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        settings = keep_system_prefix(settings, opened.tokenizer, system)
    return PrefixCache(opened.model.make_cache(settings), settings)


def _load(path: Path, opened: OpenModel, settings: CacheSettings) -> PrefixCache:
    """Raise `UserError` if the file is of another model, or if the options ask for another kind of cache."""
    cache = prompt_cache.load(path, opened.model, opened.tokenizer)
    for name in ("max_kv_size", "kv_bits"):
        wanted, stored = getattr(settings, name), getattr(cache.settings, name)
        if wanted not in (None, stored):
            made = f"with {option(name)} {stored}" if stored else f"without {option(name)}"
            raise UserError(f"{path} was made {made}, not {wanted}; leave the option out, or {prompt_cache.REMAKE}")
    return cache


def reuse(path: Path | None, cache: PrefixCache, ids: list[int]) -> list[int]:
    """The ids of a prompt that must still be fed; prints on standard error how many the file saves."""
    before = len(cache.ids)
    new = cache.reuse(ids)
    if path is not None:
        saved = len(ids) - len(new)
        print(f"({path} saves {saved} of the prompt's {len(ids)} tokens; it holds {before})", file=sys.stderr)
    return new


def adopt(path: Path | None, opened: OpenModel, conversation: Conversation) -> None:
    """Have a conversation go on from the file `path`, if it is given; prints how many of its tokens begin the chat."""
    if path is None:
        return
    cache = _load(path, opened, conversation.cache_settings)
    start = conversation.ids or system_prefix(opened.tokenizer, conversation.system)
    common = common_length(cache.ids, start)
    print(f"({path}: {common} of its {len(cache.ids)} tokens begin this chat)", file=sys.stderr)
    conversation.adopt(cache)


def _reading(done: int, total: int) -> None:
    status_on_terminal(f"reading: {done} of {total} tokens" + "\n" * (done == total))
