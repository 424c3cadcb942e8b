"""Check that two tokenizers give every id the same meaning, so that one model can draft for the other."""

from collections.abc import Iterator
from itertools import zip_longest

from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.tokenizer import Tokenizer

_UNUSED = (b"", False)


def check_same_tokens(draft: Tokenizer, tokenizer: Tokenizer, source: str) -> None:
    """Require that every id stands for the same bytes, and is a control token in both tokenizers or in neither.

    Ids past the end of the shorter vocabulary must be unused, since vocabularies may be padded to a round size. The
    pre-tokenizers may differ, because a draft model reads ids only.

    source: the draft's name in errors.
    Raises `UserError` that names the first id in which they differ.
    """
    pairs = zip_longest(_meanings(draft), _meanings(tokenizer), fillvalue=_UNUSED)
    for token, (theirs, ours) in enumerate(pairs):
        if theirs != ours:
            raise UserError(
                f"{source}: cannot draft for this model, since token {token} is {_describe(*theirs)} there and "
                f"{_describe(*ours)} here; choose a smaller model of the same family, or ngram"
            )


def _meanings(tokenizer: Tokenizer) -> Iterator[tuple[bytes, bool]]:
    """(bytes, whether it is a control token) of each id."""
    controls = set(tokenizer.special_tokens.values())
    return ((token, n in controls) for n, token in enumerate(tokenizer.vocabulary.tokens))


def _describe(token: bytes, is_control: bool) -> str:
    text = repr(token.decode("utf-8", "backslashreplace")) if token else "unused"
    return f"the control token {text}" if is_control else text
