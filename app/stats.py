"""Speed and memory of an answer."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

from mlx_llama3.generation.speculative.speculation import Speculation
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.settings import CacheSettings

import mlx.core as mx


class DraftStats(NamedTuple):
    """Speculative decoding of one answer: drafted tokens, accepted ones, their share, and tokens without a draft."""

    proposed: int
    accepted: int
    acceptance: float
    undrafted: int


class Stats(NamedTuple):
    """Token counts and tokens per second of one answer. peak_memory_gb: MLX's peak so far, in 10**9 bytes."""

    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory_gb: float
    draft: DraftStats | None = None

    def lines(self) -> str:
        """The statistics as three lines of text, four with drafts."""
        lines = (
            f"prompt: {self.prompt_tokens} tokens, {self.prompt_tps:.1f} tokens/s\n"
            f"answer: {self.generation_tokens} tokens, {self.generation_tps:.1f} tokens/s\n"
            f"peak memory: {self.peak_memory_gb:.2f} GB"
        )
        if self.draft is None:
            return lines
        if not self.draft.proposed:
            return f"{lines}\ndrafts: none in {self.draft.undrafted} tokens"
        return (
            f"{lines}\ndrafts: {self.draft.accepted} of {self.draft.proposed} tokens right "
            f"({self.draft.acceptance:.0%}), {self.draft.undrafted} tokens without a draft"
        )

    def as_object(self) -> dict[str, Any]:
        """The statistics for JSON; `draft` is present only if the answer was drafted."""
        fields = self._asdict()
        draft = fields.pop("draft")
        return fields if draft is None else fields | {"draft": draft._asdict()}


def cache_line(layers: Sequence[KVCache], settings: CacheSettings) -> str:
    """One line of text: the tokens in a cache and the memory that it uses."""
    nbytes = sum(array.nbytes for layer in layers for array in layer.state)
    tokens, window, kind = str(layers[0].offset), settings.max_kv_size, ""
    if settings.kv_bits:
        kind = f" (keys in 8 bits, values in {settings.kv_bits})"
    elif window is not None and layers[0].offset > window:
        tokens, kind = f"{window} of {tokens}", " (the system prompt and the last ones)"
    return f"cache: {tokens} tokens in {nbytes / 1e6:.1f} MB{kind}"


class Meter:
    """A stopwatch for one answer: it starts when it is created, before the prompt is read; `tick` counts a token."""

    def __init__(self) -> None:
        self._start = self._first = self._last = perf_counter()
        self._count = 0

    def tick(self) -> None:
        """Count one generated token."""
        self._last = perf_counter()
        if self._count == 0:
            self._first = self._last
        self._count += 1

    def stats(self, prompt_tokens: int, draft: Speculation | None = None) -> Stats:
        """The statistics so far. The time up to the first token counts for the prompt; an unmeasured speed is 0.

        draft: the answer's speculative decoding, if it was drafted.
        """
        return Stats(
            prompt_tokens,
            _rate(prompt_tokens if self._count else 0, self._first - self._start),
            self._count,
            _rate(self._count - 1, self._last - self._first),
            round(mx.get_peak_memory() / 1e9, 3),
            draft and DraftStats(draft.proposed, draft.accepted, round(draft.acceptance, 3), draft.undrafted_tokens),
        )


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 2) if count > 0 and seconds > 0 else 0.0
