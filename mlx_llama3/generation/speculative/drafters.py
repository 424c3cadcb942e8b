"""Guesses at the next tokens, for the model to check: from what the text said before, or from a smaller model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from mlx_llama3.generation.decoding import prefill
from mlx_llama3.generation.sampling import Sampler
from mlx_llama3.model.cache.prefix import PrefixCache
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx


class Drafter(Protocol):
    """Guesses of one stream. It is told every token, in order."""

    def begin(self, ids: Sequence[int], *, chunk: int, on_chunk: Callable[[], None]) -> None:
        """An answer begins after `ids`, all of the context. on_chunk is called after every `chunk` that was read; what
        it raises ends the generation."""

    def ready(self) -> bool:
        """Whether there is anything to propose; costs nothing to ask."""

    def propose(self, count: int, sampler: Sampler) -> mx.array:
        """1 to `count` next tokens `(n,)`, queued; only when `ready`. `sampler` may be used up."""

    def advance(self, tokens: Sequence[int], accepted: int) -> None:
        """These tokens came; the first `accepted` of them are what was last proposed."""


class NgramDrafter:
    """Prompt lookup: what followed the last tokens where they stood before (Saxena 2023, "Prompt Lookup Decoding").

    The longest match of two tokens or more counts, of equal ones the latest. What followed may run into the end of the
    text; it then goes round, as in LZ77.
    """

    LONGEST = 16  # tokens of a match that are compared
    PLACES = 32  # where the last two tokens stood before, from the latest back

    def __init__(self) -> None:
        self.begin([])

    def begin(self, ids: Sequence[int], *, chunk: int = 512, on_chunk: Callable[[], None] = lambda: None) -> None:
        """As in `Drafter`; about half a millisecond for a thousand tokens."""
        self._ids: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # pair -> where it last ended
        self._before: list[int] = []  # for the end of each pair, where the same one ended before it; 0: nowhere
        self.advance(ids, 0)

    def ready(self) -> bool:
        """As in `Drafter`."""
        return self._place > 0

    def propose(self, count: int, sampler: Sampler | None = None) -> mx.array:
        """As in `Drafter`."""
        source, period = self._ids[self._place :], len(self._ids) - self._place
        return mx.array([source[i % period] for i in range(count)], dtype=mx.uint32)

    def advance(self, tokens: Sequence[int], accepted: int) -> None:
        """As in `Drafter`."""
        for token in tokens:
            self._ids.append(token)
            pair = tuple(self._ids[-2:])
            self._before.append(self._latest.get(pair, 0))
            self._latest[pair] = len(self._ids)
        self._place = max(self._places(), key=self._common, default=0)  # of equal ones the first, which is the latest

    def _places(self) -> Iterator[int]:
        """Where the last two tokens stood before: the ends of these pairs, the latest first."""
        place = self._before[-1] if self._before else 0
        for _ in range(self.PLACES):
            if place == 0:
                return
            yield place
            place = self._before[place - 1]

    def _common(self, place: int) -> int:
        """How many tokens before `place` are the last tokens."""
        ids, longest = self._ids, min(place, self.LONGEST)
        return next((n for n in range(longest) if ids[place - 1 - n] != ids[-1 - n]), longest)


class ModelDrafter:
    """A smaller model that guesses, with a cache of its own, which follows the stream from answer to answer.

    It draws with the noise that the large model will draw with (`sampling.draw`) and under the same penalties, so that
    equal distributions give equal tokens.

    vocab_size: the large model's. Rows past a vocabulary's end are padding; such tokens are never proposed.
    """

    def __init__(self, model: Transformer, vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        self._held = PrefixCache(model.make_cache())
        self._ids: list[int] = []
        self._guessed = 0  # guesses that were fed, after `_ids`
        self._chunk = 512

    def begin(self, ids: Sequence[int], *, chunk: int = 512, on_chunk: Callable[[], None] = lambda: None) -> None:
        """As in `Drafter`."""
        self._held.set_ids(self._ids)
        self._ids, self._chunk, self._guessed = [], chunk, 0
        self._take(ids)
        new = self._held.reuse(self._ids)
        if self.ready() and new[:-1]:
            prefill(self._model, new[:-1], self._held.layers, chunk=chunk, on_prefill=lambda *_: on_chunk())
            mx.async_eval([layer.state for layer in self._held.layers])

    def ready(self) -> bool:
        """As in `Drafter`: while the draft model's context lasts."""
        return len(self._ids) <= self._model.args.max_seq_len

    def propose(self, count: int, sampler: Sampler) -> mx.array:
        """As in `Drafter`."""
        layers = self._held.layers
        count = min(count, self._model.args.max_seq_len - len(self._ids) + 1)
        logits = prefill(self._model, self._ids[layers[0].offset :], layers, chunk=self._chunk)
        tokens: list[mx.array] = []
        while True:
            token, _ = sampler(self._fitted(logits))
            mx.async_eval(token)  # the device begins while the host builds the next pass
            tokens.append(token)
            if len(tokens) == count:
                break
            logits = self._model(token[:, None], layers[0].offset, layers)[:, -1]  # (1, vocab)
        self._guessed = count - 1
        return mx.concatenate(tokens)

    def advance(self, tokens: Sequence[int], accepted: int) -> None:
        """As in `Drafter`."""
        wrong = self._guessed - min(accepted, self._guessed)
        for layer in self._held.layers:
            layer.trim(wrong)
        self._guessed = 0
        self._take(tokens)

    def _take(self, tokens: Sequence[int]) -> None:
        last = self._model.args.vocab_size - 1
        self._ids += [min(token, last) for token in tokens]

    def _fitted(self, logits: mx.array) -> mx.array:
        """Logits `(1, vocab)` of the draft model -> of the large model's vocabulary."""
        missing = self._vocab_size - logits.shape[-1]
        if missing > 0:
            return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
        return logits[:, : self._vocab_size]
