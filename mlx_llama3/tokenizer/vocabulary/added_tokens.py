"""Tokens that lie outside the merges: control tokens, and plain text that a publisher added whole."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_CONTROL_FORM = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


def has_control_form(name: str) -> bool:
    """Whether a token is written `<|...|>`.

    Some publishers mark the tokens that open a role as ordinary text. Their form says what they are, and no user's
    text may write them.
    """
    return _CONTROL_FORM.fullmatch(name) is not None


def classify(added: Iterable[tuple[str, int, bool]]) -> tuple[dict[str, int], dict[str, int]]:
    """Sort (name, id, marked as special) into control tokens and plain ones, name -> id each."""
    special: dict[str, int] = {}
    plain: dict[str, int] = {}
    for name, n, marked in added:
        (special if marked or has_control_form(name) else plain)[name] = n
    return special, plain


def token_table(words: Iterable[tuple[bytes, int]], *added: Mapping[str, int]) -> list[bytes]:
    """id -> bytes of merged tokens, and of added ones (their names); empty for ids that none of them uses."""
    entries = {n: token for token, n in words} | {n: name.encode() for group in added for name, n in group.items()}
    return [entries.get(n, b"") for n in range(max(entries) + 1)]


def matcher(names: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern with one group that finds any of `names`, at each place the longest; None without names."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def name_of(token: Any) -> str | None:
    """The name of a token as configuration files write it: a string, or an object with `content`."""
    name = token.get("content") if isinstance(token, Mapping) else token
    return name if isinstance(name, str) else None
