"""How fast an answer came."""

from time import perf_counter
from typing import NamedTuple

import mlx.core as mx


class Stats(NamedTuple):
    """Tokens and tokens a second of one answer; memory as MLX counts it, its highest so far, in 10**9 bytes."""

    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory_gb: float

    def lines(self) -> str:
        """Three lines for people."""
        return (
            f"prompt: {self.prompt_tokens} tokens, {self.prompt_tps:.1f} tokens/s\n"
            f"answer: {self.generation_tokens} tokens, {self.generation_tps:.1f} tokens/s\n"
            f"peak memory: {self.peak_memory_gb:.2f} GB"
        )


class Meter:
    """A stopwatch: made when the prompt is handed over, `tick` at every token."""

    def __init__(self) -> None:
        self._start = self._first = self._last = perf_counter()
        self._count = 0

    def tick(self) -> None:
        """One more token is there."""
        self._last = perf_counter()
        if self._count == 0:
            self._first = self._last
        self._count += 1

    def stats(self, prompt_tokens: int) -> Stats:
        """Speeds so far: the first token ends the time of the prompt; 0 where nothing was timed."""
        return Stats(
            prompt_tokens,
            _rate(prompt_tokens if self._count else 0, self._first - self._start),
            self._count,
            _rate(self._count - 1, self._last - self._first),
            round(mx.get_peak_memory() / 1e9, 3),
        )


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 2) if count > 0 and seconds > 0 else 0.0
