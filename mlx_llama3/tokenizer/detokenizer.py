"""Incremental detokenization: ids to text, one id at a time, without incomplete characters."""

import codecs
from collections.abc import Callable


class Detokenizer:
    """Incremental decoder of one answer.

    For any ids, the texts of `add` and the rest from `finish` join to the text of decoding all ids at once.

    Args:
        text_bytes: id -> the bytes that it adds to the text; empty for a control token.
    """

    def __init__(self, text_bytes: Callable[[int], bytes]) -> None:
        self._text_bytes = text_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """The text that `token` completes; the bytes of an incomplete character are kept for the next call."""
        return self._decoder.decode(self._text_bytes(token))

    def finish(self) -> str:
        """U+FFFD for an incomplete character at the end, if there is one; resets the decoder for the next answer."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
