"""Strings that end an answer, found wherever the pieces of the text are cut."""

from collections.abc import Sequence

from mlx_llama3.errors import UserError


class StopStrings:
    """Watches a growing text for the first stop string that is complete in it.

    What is returned never contains a stop string nor the beginning of one that could still become whole, and does not
    depend on how the text was cut. If two stop strings are complete at the same character, the longer one counts.

    Raises `UserError` for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        stops = [stops] if isinstance(stops, str) else list(stops)
        if not all(stops):
            raise UserError("a stop string is empty; expected at least one character")
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """The text that is safe to show now, and whether a stop string was reached (what follows it is dropped)."""
        text = self._held + text
        found = [(n + len(stop), n) for stop in self._stops if (n := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        safe = len(text) - self._open_length(text)
        self._held = text[safe:]
        return text[:safe], False

    def finish(self) -> str:
        """The text held back, now that nothing follows."""
        rest, self._held = self._held, ""
        return rest

    def _open_length(self, text: str) -> int:
        """How many of the last characters could begin a stop string."""
        longest = min(self._longest - 1, len(text))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0)
