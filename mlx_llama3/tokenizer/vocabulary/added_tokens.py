"""Added tokens, which are not made by merges: control tokens, and plain text that a publisher added whole."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_CONTROL_FORM = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


def has_control_form(name: str) -> bool:
    """Whether a token has the form `<|...|>`.

    Some publishers mark the tokens that open a role as ordinary text. Their form shows that they are control tokens,
    which text of a user must not produce.
    """
    return _CONTROL_FORM.fullmatch(name) is not None


def classify(added: Iterable[tuple[str, int, bool]]) -> tuple[dict[str, int], dict[str, int]]:
    """Divide (name, id, is marked special) into control tokens and plain ones, each name -> id."""
    special: dict[str, int] = {}
    plain: dict[str, int] = {}
    for name, n, marked in added:
        (special if marked or has_control_form(name) else plain)[name] = n
    return special, plain


def token_table(words: Iterable[tuple[bytes, int]], *added: Mapping[str, int]) -> list[bytes]:
    """id -> bytes of the tokens in `words` and, by their names, of the added ones; empty for unused ids."""
    entries = {n: token for token, n in words} | {n: name.encode() for group in added for name, n in group.items()}
    return [entries.get(n, b"") for n in range(max(entries) + 1)]


def matcher(names: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern, with one group, that matches the longest of `names` at each place; None without names."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def name_of(token: Any) -> str | None:
    """The name of a token that a configuration file gives as a string or as an object with `content`; else None."""
    name = token.get("content") if isinstance(token, Mapping) else token
    return name if isinstance(name, str) else None
