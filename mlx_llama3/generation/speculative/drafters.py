"""Drafters: they propose the next tokens, from an earlier place in the text or from a smaller model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from mlx_llama3.generation.decoding import prefill
from mlx_llama3.generation.sampling import Sampler
from mlx_llama3.model.cache.prefix import PrefixCache
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx


class Drafter(Protocol):
    """The interface of a drafter, which serves one stream and receives every token of it, in order."""

    def begin(self, ids: Sequence[int], *, chunk: int, on_chunk: Callable[[], None]) -> None:
        """Start an answer after `ids`, the whole context.

        on_chunk: called after every `chunk` positions of prefill; an exception in it ends the generation.
        """

    def ready(self) -> bool:
        """Whether there is anything to propose; cheap to call."""

    def propose(self, count: int, sampler: Sampler) -> mx.array:
        """1 to `count` next tokens `(n,)`, queued. Call it only when `ready`; it may advance the sampler's state."""

    def advance(self, tokens: Sequence[int], accepted: int) -> None:
        """Append generated `tokens`; the first `accepted` of them equal those last proposed."""


class NgramDrafter:
    """Prompt lookup: proposes what followed an earlier occurrence of the last tokens (Saxena 2023, "Prompt Lookup
    Decoding").

    The longest match of at least two tokens wins, and of equally long ones the latest. If the continuation reaches the
    end of the text, it repeats from the end of the match on, as in LZ77.
    """

    LONGEST = 16  # tokens compared to measure a match
    PLACES = 32  # earlier occurrences of the last two tokens to compare, from the latest back

    def __init__(self) -> None:
        self.begin([])

    def begin(self, ids: Sequence[int], *, chunk: int = 512, on_chunk: Callable[[], None] = lambda: None) -> None:
        """As in `Drafter`; about half a millisecond for a thousand tokens."""
        self._ids: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # pair of ids -> end of its latest occurrence
        self._previous: list[int] = []  # for the pair that ends at each id: end of its previous occurrence; 0: none
        self.advance(ids, 0)

    def ready(self) -> bool:
        """As in `Drafter`."""
        return self._match_end > 0

    def propose(self, count: int, sampler: Sampler | None = None) -> mx.array:
        """As in `Drafter`."""
        continuation = self._ids[self._match_end :]
        return mx.array([continuation[i % len(continuation)] for i in range(count)], dtype=mx.uint32)

    def advance(self, tokens: Sequence[int], accepted: int) -> None:
        """As in `Drafter`."""
        for token in tokens:
            self._ids.append(token)
            pair = tuple(self._ids[-2:])
            self._previous.append(self._latest.get(pair, 0))
            self._latest[pair] = len(self._ids)
        # `max` returns the first of equally long matches, which is the latest.
        self._match_end = max(self._candidate_ends(), key=self._match_length, default=0)

    def _candidate_ends(self) -> Iterator[int]:
        """Ends of the earlier occurrences of the last two tokens, the latest first."""
        end = self._previous[-1] if self._previous else 0
        for _ in range(self.PLACES):
            if end == 0:
                return
            yield end
            end = self._previous[end - 1]

    def _match_length(self, end: int) -> int:
        """Number of tokens, up to `LONGEST`, in which the text up to `end` ends like the whole text."""
        ids, longest = self._ids, min(end, self.LONGEST)
        return next((n for n in range(longest) if ids[end - 1 - n] != ids[-1 - n]), longest)


class ModelDrafter:
    """Drafts with a smaller model, whose own cache follows the stream from answer to answer.

    It samples with the same random keys (`sampling.draw`) and penalties as the large model, so equal distributions
    give equal tokens.

    vocab_size: the large model's. Logits past the end of the smaller vocabulary are padded with -inf, so such tokens
    are never proposed.
    """

    def __init__(self, model: Transformer, vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        self._cache = PrefixCache(model.make_cache())
        self._ids: list[int] = []
        self._draft_length = 0  # drafted tokens in the cache, after `_ids`
        self._chunk = 512

    def begin(self, ids: Sequence[int], *, chunk: int = 512, on_chunk: Callable[[], None] = lambda: None) -> None:
        """As in `Drafter`."""
        self._cache.set_ids(self._ids)
        self._ids, self._chunk, self._draft_length = [], chunk, 0
        self._append(ids)
        new = self._cache.reuse(self._ids)
        if self.ready() and new[:-1]:
            prefill(self._model, new[:-1], self._cache.layers, chunk=chunk, on_prefill=lambda *_: on_chunk())
            mx.async_eval([layer.state for layer in self._cache.layers])

    def ready(self) -> bool:
        """As in `Drafter`; True until the draft model's context window is full."""
        return len(self._ids) <= self._model.args.max_seq_len

    def propose(self, count: int, sampler: Sampler) -> mx.array:
        """As in `Drafter`."""
        layers = self._cache.layers
        count = min(count, self._model.args.max_seq_len - len(self._ids) + 1)
        logits = prefill(self._model, self._ids[layers[0].offset :], layers, chunk=self._chunk)
        tokens: list[mx.array] = []
        while True:
            token, _ = sampler(self._fitted(logits))
            mx.async_eval(token)  # the device starts while the host builds the next pass
            tokens.append(token)
            if len(tokens) == count:
                break
            logits = self._model(token[:, None], layers[0].offset, layers)[:, -1]  # (1, vocab)
        self._draft_length = count - 1
        return mx.concatenate(tokens)

    def advance(self, tokens: Sequence[int], accepted: int) -> None:
        """As in `Drafter`."""
        rejected = self._draft_length - min(accepted, self._draft_length)
        for layer in self._cache.layers:
            layer.trim(rejected)
        self._draft_length = 0
        self._append(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        """Append ids, those past the draft model's vocabulary as its last id."""
        last = self._model.args.vocab_size - 1
        self._ids += [min(token, last) for token in tokens]

    def _fitted(self, logits: mx.array) -> mx.array:
        """The draft model's logits `(1, vocab)`, padded with -inf or truncated to the large model's vocabulary."""
        missing = self._vocab_size - logits.shape[-1]
        if missing > 0:
            return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
        return logits[:, : self._vocab_size]
