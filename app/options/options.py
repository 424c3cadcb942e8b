"""Options that several commands share: the model, the context, the prompt, and how tokens are chosen.

One table, `SETTINGS`, serves the command line (`--top-k 40`) and the chat (`/set top_k 40`).
"""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mlx_llama3.model.cache.settings import CacheSettings


def number(text: str) -> float:
    """A number, for argparse and `/set`."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def whole(text: str) -> int:
    """A whole number, for argparse and `/set`."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse and `/set`."""
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def utf8(text: str) -> str:
    """Text in UTF-8. Python turns other bytes of an argument into lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"it is not UTF-8 at character {error.start + 1}") from None
    return text


def stop_strings(text: str) -> list[str]:
    """One stop string, in a list: argparse collects such lists, `/set` takes one."""
    if not text:
        raise argparse.ArgumentTypeError("the stop string is empty")
    return [utf8(text)]


def token_bias(text: str) -> dict[int, float]:
    """A mapping from `ID:BIAS` pairs separated by commas."""
    pairs = [pair.partition(":") for pair in text.split(",")]
    if not all(colon for _, colon, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not ID:BIAS, as in 42:-1.5")
    return {whole(token): number(bias) for token, _, bias in pairs}


def token_ids(text: str) -> list[int]:
    """Token ids from `1,2,3`."""
    return [whole(word) for word in text.split(",")]


class Setting(NamedTuple):
    """One option of `generate`: how it is read, and what `--help` says."""

    parse: Callable[[str], Any]
    metavar: str
    help: str
    aliases: tuple[str, ...] = ()


SETTINGS = {
    "temperature": Setting(number, "T", "0 always takes the best token, 0.7 varies, above 1 is wild", ("--temp",)),
    "top_k": Setting(whole, "K", "choose among the K best tokens (0: off)"),
    "top_p": Setting(number, "P", "choose among the best tokens that hold probability P together (1: off)"),
    "min_p": Setting(number, "P", "leave out tokens less probable than P times the best (0: off)"),
    "repetition_penalty": Setting(number, "X", "weaken tokens that are in the prompt or answer, as 1.1 does (1: off)"),
    "presence_penalty": Setting(number, "X", "subtracted from the logit of a token in the answer (0: off)"),
    "frequency_penalty": Setting(number, "X", "subtracted for each time that a token is in the answer (0: off)"),
    "logit_bias": Setting(token_bias, "ID:BIAS", "added to the logit of token ID; -inf bans it; repeatable"),
    "seed": Setting(whole, "N", "same seed, same answer (default: a new one each time)"),
    "max_tokens": Setting(positive, "N", "the longest answer, in tokens"),
    "stop": Setting(stop_strings, "TEXT", "end the answer before this text; repeatable"),
}


def option(name: str) -> str:
    """`--max-kv-size` for `max_kv_size`."""
    return "--" + name.replace("_", "-")


@contextmanager
def named_as_typed() -> Iterator[None]:
    """In a `UserError` raised within, replace the library's parameter names by options: `top_k` by `--top-k`."""
    from mlx_llama3.errors import UserError  # here, because importing the library loads its BLAS

    try:
        yield
    except UserError as error:
        names = "|".join((*SETTINGS, "max_kv_size", "kv_bits"))
        raise UserError(re.sub(rf"\b({names})\b", lambda match: option(match[0]), str(error))) from error


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Add `--model`, which `options/model.py` opens."""
    parser.add_argument(
        "-m",
        "--model",
        metavar="NAME",
        default="demo",
        help="a folder, a hub id, or an alias such as llama3.2-1b (default: demo, a small model, fetched once)",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add `--model`, `--context` and `--system`."""
    add_model_option(parser)
    parser.add_argument(
        "--context", type=positive, metavar="N", help="use at most N tokens of context (default: the model's own)"
    )
    parser.add_argument("--system", type=utf8, metavar="TEXT", help="the system prompt")


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add `--prompt`, `--messages`, `--raw` and `--ids`, of which one can be given."""
    group = parser.add_argument_group("the prompt (without any: standard input is the message)")
    group = group.add_mutually_exclusive_group()
    group.add_argument("-p", "--prompt", type=utf8, metavar="TEXT", help="one message of the user")
    group.add_argument(
        "--messages", type=Path, metavar="FILE", help='a chat as JSON: [{"role": "user", "content": "..."}, ...]'
    )
    group.add_argument("--raw", type=utf8, metavar="TEXT", help="text to continue, without a chat format")
    group.add_argument("--ids", type=token_ids, metavar="1,2,3", help="token ids to continue")


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """Add `--draft` and `--draft-tokens`, which `options/draft.py` reads."""
    parser.add_argument(
        "--draft",
        metavar="NAME",
        help="speculative decoding, faster with the same tokens: a smaller model of the same family, or ngram, which "
        "looks up earlier text; drafting switches itself off while it costs more than it saves",
    )
    parser.add_argument(
        "--draft-tokens", type=positive, metavar="N", help="draft at most N at a time (default: 4, with ngram 6)"
    )


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add `--kv-bits`, which `cache_settings` reads."""
    parser.add_argument(
        "--kv-bits",
        type=whole,
        choices=(4, 8),
        help="a quantized KV cache, for more context in the same memory: keys in 8 bits, values in 4 or 8 "
        "(default: not quantized)",
    )


def add_window_option(parser: argparse.ArgumentParser) -> None:
    """Add `--max-kv-size`, which `cache_settings` reads."""
    parser.add_argument(
        "--max-kv-size",
        type=positive,
        metavar="N",
        help="keep at most N tokens in the KV cache: the system prompt and the latest ones (default: all)",
    )


def add_prompt_cache_option(parser: argparse.ArgumentParser) -> None:
    """Add `--prompt-cache`."""
    parser.add_argument(
        "--prompt-cache",
        type=Path,
        metavar="FILE",
        help="a file that mlx-llama3 cache wrote: the start that it has in common with the prompt is not read again",
    )


def cache_settings(args: argparse.Namespace) -> "CacheSettings":
    """The KV cache that the options ask for. Raises `UserError` for options that exclude each other."""
    from mlx_llama3.model.cache.settings import CacheSettings  # here, because --help must not import MLX

    names = {each.name for each in fields(CacheSettings)}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    with named_as_typed():
        return CacheSettings(**given)


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add all of `SETTINGS`. Those not given stay out of the namespace, so that a saved conversation keeps its own."""
    group = parser.add_argument_group("how the answer is made")
    defaults = {"temperature": 0, "max_tokens": max_tokens}
    for name, setting in SETTINGS.items():
        group.add_argument(
            option(name),
            *setting.aliases,
            type=setting.parse,
            action="append" if name in ("logit_bias", "stop") else "store",
            default=argparse.SUPPRESS,
            metavar=setting.metavar,
            help=setting.help + (f" (default: {defaults[name]})" if name in defaults else ""),
        )


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, as arguments of `generate`. Raises `UserError` for a value out of range."""
    settings = {name: value for name, value in vars(args).items() if name in SETTINGS}
    if "logit_bias" in settings:
        settings["logit_bias"] = {token: bias for each in settings["logit_bias"] for token, bias in each.items()}
    if "stop" in settings:
        settings["stop"] = [text for each in settings["stop"] for text in each]
    with named_as_typed():
        check_settings(settings)
    return settings


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise `UserError` for a value out of range, before a model is loaded."""
    from mlx_llama3.generation.sampling import Sampling

    names = {each.name for each in fields(Sampling)}
    Sampling(**{name: value for name, value in settings.items() if name in names})
