"""Stop strings: strings that end an answer, also when they span several pieces of the streamed text."""

from collections.abc import Sequence

from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.tokenizer import Tokenizer


def all_stop_ids(tokenizer: Tokenizer, stops: Sequence[str]) -> frozenset[int]:
    """The ids that end an answer: the tokenizer's, and those of the control tokens that are named in `stops`.

    Raises `UserError` for a stop string with a control token beside other text. It could never be found, because
    control tokens are no text.
    """
    stops, special = [stops] if isinstance(stops, str) else stops, tokenizer.special_tokens
    for stop in stops:
        name = next((name for name in special if name in stop and stop not in special), None)
        if name is not None:
            raise UserError(f"the stop string {stop!r} has text beside the control token {name}; give {name} alone")
    return tokenizer.stop_ids.union(special[stop] for stop in stops if stop in special)


class StopStrings:
    """Searches a streamed text for the first stop string that is complete in it.

    The returned text never contains a stop string, nor the beginning of one that could still be completed. It does not
    depend on where the pieces are divided. If two stop strings are complete at the same character, the longer one
    counts.

    Raises `UserError` for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        stops = [stops] if isinstance(stops, str) else list(stops)
        if not all(stops):
            raise UserError("a stop string is empty; expected at least one character")
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._pending = ""  # the end of the text, which may begin a stop string

    def add(self, text: str) -> tuple[str, bool]:
        """(text that is safe to print, whether a stop string was completed); text after a stop string is dropped."""
        text = self._pending + text
        matches = [(n + len(stop), n) for stop in self._stops if (n := text.find(stop)) >= 0]  # (end, start)
        if matches:
            self._pending = ""
            return text[: min(matches)[1]], True
        safe = len(text) - self._open_length(text)
        self._pending = text[safe:]
        return text[:safe], False

    def finish(self) -> str:
        """The pending text, once no more text follows."""
        rest, self._pending = self._pending, ""
        return rest

    def _open_length(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(self._longest - 1, len(text))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0)
