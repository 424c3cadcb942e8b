"""Whether two tokenizers mean the same by their ids, so that one model can draft for the other."""

from collections.abc import Iterator
from itertools import zip_longest

from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.tokenizer import Tokenizer

_UNUSED = (b"", False)


def check_same_tokens(draft: Tokenizer, tokenizer: Tokenizer, source: str) -> None:
    """Every id must stand for the same bytes, and for a control token in both or in none.

    Ids past the shorter vocabulary must be unused: tables padded to a round size differ so. How text is cut into
    tokens does not matter, since a draft sees ids only.

    source: the draft, to be named in errors.
    Raises `UserError` that names the first id in which they differ.
    """
    pairs = zip_longest(_meanings(draft), _meanings(tokenizer), fillvalue=_UNUSED)
    for token, (theirs, ours) in enumerate(pairs):
        if theirs != ours:
            raise UserError(
                f"{source}: cannot draft for this model, since token {token} is {_shown(*theirs)} there and "
                f"{_shown(*ours)} here; choose a smaller model of the same family, or ngram"
            )


def _meanings(tokenizer: Tokenizer) -> Iterator[tuple[bytes, bool]]:
    """Of each id the bytes, and whether it is a control token."""
    controls = set(tokenizer.special_tokens.values())
    return ((token, n in controls) for n, token in enumerate(tokenizer.vocabulary.tokens))


def _shown(token: bytes, is_control: bool) -> str:
    written = repr(token.decode("utf-8", "backslashreplace")) if token else "unused"
    return f"the control token {written}" if is_control else written
