"""Ids to text, one at a time: a character appears once all its bytes are there."""

import codecs
from collections.abc import Callable


class Detokenizer:
    """Incremental decoding of one answer.

    For any ids, the texts that `add` returns and the rest from `finish` join to what decoding all ids at once gives.

    Args:
        text_bytes: id -> the bytes it adds to the text; none for a control token.
    """

    def __init__(self, text_bytes: Callable[[int], bytes]) -> None:
        self._text_bytes = text_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """The text that is certain now; bytes that may begin a character wait for the rest of it."""
        return self._decoder.decode(self._text_bytes(token))

    def finish(self) -> str:
        """What still waits: a character that never became whole, as U+FFFD. Ready for the next answer afterwards."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
