"""Checks that the parts of a `tokenizer.json` have the form that the library `tokenizers` writes.

Every part is checked before it is used, so that a damaged file gives an error that names it.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from mlx_llama3.errors import UserError

_LARGEST_ID = 2**22  # bounds the token table, which is as long as the largest id


def check_pipeline(document: Mapping[str, Any], path: Path) -> None:
    """Check all parts but the model. Raises `UserError` that names the part."""
    added = document.get("added_tokens", [])
    named = _are_objects(added) and all(isinstance(entry.get("content"), str) for entry in added)
    _need(named and _are_ids(entry.get("id") for entry in added), "added_tokens", path)
    _need(_is_object(document.get("normalizer")), "normalizer", path)
    for key, parts in (("pre_tokenizer", "pretokenizers"), ("post_processor", "processors")):
        step = document.get(key)
        _need(_is_object(step) and _are_objects((step or {}).get(parts, [])), key, path)
    processor = document.get("post_processor") or {}
    for step in (processor, *processor.get("processors", [])):
        _need(_is_template(step.get("single", [])), "post_processor", path)


def check_added_by_configuration(entries: Any, path: Path) -> None:
    """Check the `added_tokens_decoder` of a `tokenizer_config.json`, id -> token. Raises `UserError`."""
    ids = [int(n) if n.isdecimal() else None for n in entries] if isinstance(entries, Mapping) else [None]
    named = _are_ids(ids) and _are_objects([*entries.values()])
    _need(
        named and all(isinstance(entry.get("content"), str) for entry in entries.values()), "added_tokens_decoder", path
    )


def check_model(model: Mapping[str, Any], path: Path) -> None:
    """Check the words and merges of a BPE model. Raises `UserError` that names the part."""
    words, merges = model["vocab"], model.get("merges")
    _need(bool(words) and _are_ids(words.values()), "model.vocab", path)
    pairs = [merge for merge in merges if not isinstance(merge, str)] if isinstance(merges, list) else [None]
    are_pairs = set(map(type, pairs)) <= {list} and set(map(len, pairs)) <= {2}
    _need(are_pairs and set(map(type, chain.from_iterable(pairs))) <= {str}, "model.merges", path)
    _need(isinstance(model.get("unk_token"), str | None), "model.unk_token", path)


def _need(condition: bool, part: str, path: Path) -> None:
    if not condition:
        raise UserError(f"{path}: {part} is not in the form of the library `tokenizers`; fetch the file again")


def _is_object(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _are_objects(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, Mapping) for value in values)


def _are_ids(values: Iterable[Any]) -> bool:
    values = list(values)
    return set(map(type, values)) <= {int} and min(values, default=0) >= 0 and max(values, default=0) <= _LARGEST_ID


def _is_template(pieces: Any) -> bool:
    """Whether `pieces` is a post-processor's template, whose special tokens are named by strings."""
    if not _are_objects(pieces):
        return False
    tokens = [piece.get("SpecialToken") for piece in pieces]
    return all(_is_object(token) and isinstance((token or {}).get("id"), str | None) for token in tokens)
