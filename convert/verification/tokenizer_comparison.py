"""Compares the tokenizer, the chat templates and the stop ids of a folder with those of its source."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from convert.sources.source import Source
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import read_json
from mlx_llama3.tokenizer.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Verdict:
    """One part of a verification. ok: None if the part was not compared. words: what was found, or why it was not."""

    part: str
    ok: bool | None
    words: str

    def __str__(self) -> str:
        verdict = {True: "verified", False: "NOT VERIFIED", None: "not compared"}[self.ok]
        return f"{self.part}: {verdict}, {self.words}"


def compare_tokenizers(target: Source, source: Source) -> list[Verdict]:
    """Verdicts on "tokenizer", "chat template" and "stop ids". The source's are what `convert` would write.

    Raises nothing for a tokenizer that cannot be read: that is a verdict.
    """
    with TemporaryDirectory() as name:
        if not source.write_tokenizer(Path(name)):
            return [Verdict("tokenizer, chat template, stop ids", None, "the source has no tokenizer")]
        # The versions of a `tokenizer.model` are told apart by config.json. The folder's was compared already.
        config = read_json(target.path / "config.json") | {"eos_token_id": None}
        for file, content in (("config.json", config), ("generation_config.json", source.generation_config)):
            (Path(name) / file).write_text(json.dumps(content), encoding="utf-8")
        try:
            expected = load_tokenizer(name)
        except UserError as error:
            words = f"the source's cannot be read: {str(error).removeprefix(name).lstrip('/: ')}"
            return [Verdict("tokenizer, chat template, stop ids", None, words)]
    try:
        actual = load_tokenizer(target.path)
    except UserError as error:
        return [Verdict("tokenizer, chat template, stop ids", False, f"the folder's cannot be read: {error}")]
    return [_tokenizer(actual, expected), _templates(actual, expected), _stop_ids(actual, expected)]


def _tokenizer(actual: Tokenizer, expected: Tokenizer) -> Verdict:
    ours, theirs = actual.vocabulary, expected.vocabulary
    others = [n for n, (one, two) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)) if one != two]
    if len(ours.tokens) != len(theirs.tokens):
        fault = f"{len(ours.tokens)} tokens, {len(theirs.tokens)} in the source"
    elif others:
        fault = f"{len(others)} of {len(ours.tokens)} tokens are others than in the source, the first is {others[0]}"
    elif (ours.special, ours.added) != (theirs.special, theirs.added):
        names = {**ours.special, **ours.added}.items() ^ {**theirs.special, **theirs.added}.items()
        named = f": {min(names)[0]}" if names else ""
        fault = f"other control or added tokens than in the source{named}"
    elif ours.ranks != theirs.ranks or ours.ids != theirs.ids:
        fault = "the merges are others than in the source"
    elif ours.pre_tokenizer.pattern != theirs.pre_tokenizer.pattern:
        fault = "text is split by another pattern than in the source"
    elif (actual.bos_id, actual.add_bos) != (expected.bos_id, expected.add_bos):
        fault = f"begins texts with {_bos(actual)}, the source with {_bos(expected)}"
    else:
        return Verdict("tokenizer", True, f"{len(ours.tokens)} tokens, equal to the source's")
    return Verdict("tokenizer", False, fault)


def _bos(tokenizer: Tokenizer) -> str:
    return f"token {tokenizer.bos_id}" if tokenizer.add_bos else "no token"


def _templates(actual: Tokenizer, expected: Tokenizer) -> Verdict:
    ours, theirs = actual.chat_templates, expected.chat_templates
    others = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if others:
        words = "; ".join(f"{name!r} {_difference(name, ours, theirs)}" for name in others)
        return Verdict("chat template", False, words)
    return Verdict("chat template", True, f"{', '.join(ours)}, equal to the source's" if ours else "neither has one")


def _difference(name: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    if name in ours and name in theirs:
        return "is another one than the source's"
    return "is not in the folder" if name in theirs else "is not in the source"


def _stop_ids(actual: Tokenizer, expected: Tokenizer) -> Verdict:
    ours, theirs = sorted(actual.stop_ids), sorted(expected.stop_ids)
    words = f"{ours}, equal to the source's" if ours == theirs else f"{ours}, the source's are {theirs}"
    return Verdict("stop ids", ours == theirs, words)
