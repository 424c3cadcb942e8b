"""Batched generation: one forward pass computes the next token of every prompt, so weights are read once for all.

Rows join and leave the running batch as their answers begin and end (continuous batching; Orca, Yu et al., OSDI 2022).
Each answer equals that of `generate` for its prompt alone: every row has its own positions, random keys, penalties and
stop strings. One limit: matrix products over several rows round differently, by some 1e-6 of a logit, so where two
tokens are closer than that, the other one may be chosen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mlx_llama3.generation.nan_check import nan_error
from mlx_llama3.generation.sampling import Sampler, Sampling
from mlx_llama3.generation.stop_strings import StopStrings, all_stop_ids
from mlx_llama3.generation.stream import SHORTEN, check_counts, check_prompt, next_text
from mlx_llama3.model.cache.batch import BatchKVCache, Rows, joined, selected
from mlx_llama3.model.cache.memory import context_bytes
from mlx_llama3.model.residual import plain
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.system.memory import check_memory, free_memory
from mlx_llama3.tokenizer.tokenizer import Tokenizer

import mlx.core as mx

AHEAD = 4  # look this many batches ahead among the waiting prompts for those of similar length


@dataclass(frozen=True)
class Request:
    """A prompt's ids and the options of its answer, with the meaning that they have for `generate`."""

    ids: Sequence[int]
    max_tokens: int = 256
    stop: Sequence[str] = ()
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, their text, and its finish reason: "stop" or "length"."""

    tokens: list[int]
    text: str
    finish_reason: str


def generate_batch(
    model: Transformer,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    *,
    batch_size: int = 8,
    prefill_chunk: int = 512,
) -> Iterator[tuple[int, Answer]]:
    """Answer all requests, `batch_size` at a time; yields (index, answer) as each ends.

    Requests start roughly in order: the one that has waited longest, with those of the next few whose prompts are
    nearest to it in length, to waste little padding. prefill_chunk: prompt tokens per forward pass, over all rows.

    Raises:
        UserError: at the first step, for a request that `generate` would refuse (call `check_prompt` to find out
            which); at any step, if the model gives NaN.
    """
    check_counts(batch_size=batch_size, prefill_chunk=prefill_chunk)
    waiting = [_Row(index, request, model, tokenizer) for index, request in enumerate(requests)]
    batch = _Batch(model, prefill_chunk)
    while waiting or batch.rows:
        free = batch_size - len(batch.rows)
        # A prefill stalls the running rows, so several rows are admitted together instead of one for each that ends.
        if waiting and (not batch.rows or free >= min(len(waiting), max(1, batch_size // 4))):
            batch.admit(_pop_similar(waiting, free, AHEAD * batch_size))
        for row in batch.step():
            yield row.index, row.answer()


def largest_batch(model: Transformer, requests: Sequence[Request], requested: int) -> int:
    """The largest batch size, at most `requested`, whose keys and values fit into free memory.

    Raises `UserError` if the longest request does not fit even alone.
    """
    longest = max(min(len(request.ids) + request.max_tokens, model.args.max_seq_len) for request in requests)
    needed = context_bytes(model.args, model.norm.weight.dtype, longest)
    # 0.7: the cache is copied when rows join or leave, and the forward passes need memory too.
    available = int(0.7 * free_memory())
    check_memory(needed, f"an answer of {longest} tokens with its prompt", SHORTEN, available=available)
    return min(requested, available // needed)


class _Row:
    """One row of the batch: a request and its unfinished answer."""

    def __init__(self, index: int, request: Request, model: Transformer, tokenizer: Tokenizer) -> None:
        check_counts(max_tokens=request.max_tokens)
        self.index, self.request = index, request
        self.max_tokens = min(request.max_tokens, check_prompt(model, request.ids))
        self.tokens: list[int] = []
        self._texts: list[str] = []
        self._reason: str | None = None
        self._detokenizer, self._stops = tokenizer.detokenizer(), StopStrings(request.stop)
        self._stop_ids = all_stop_ids(tokenizer, request.stop)
        self._vocab_size = model.args.vocab_size
        self.sampler: Sampler | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.ids)

    @property
    def takes_argmax(self) -> bool:
        """Whether its next token is the argmax of the raw logits."""
        sampling = self.request.sampling
        return sampling.greedy and not sampling.penalizes and not sampling.logit_bias

    def begin(self) -> None:
        """Create the sampler, which a waiting row does not need yet."""
        self.sampler = Sampler(self.request.sampling, self._vocab_size, self.request.ids)

    def add(self, token: int) -> bool:
        """Append a token; returns whether the answer goes on."""
        self.tokens.append(token)
        is_last = len(self.tokens) == self.max_tokens
        text, self._reason = next_text(token, self._detokenizer, self._stops, self._stop_ids, is_last=is_last)
        self._texts.append(text)
        return self._reason is None

    def answer(self) -> Answer:
        return Answer(self.tokens, "".join(self._texts), self._reason)


class _Batch:
    """The running rows, their cache, and the next token of each, queued and perhaps not computed yet."""

    def __init__(self, model: Transformer, prefill_chunk: int) -> None:
        self.rows: list[_Row] = []
        self._model, self._chunk = model, prefill_chunk
        self._cache: list[BatchKVCache] = []
        self._tokens = self._largest = mx.array([])  # (B,) each

    def admit(self, rows: list[_Row]) -> None:
        """Prefill the prompts of new rows and sample the first token of each."""
        for row in rows:
            row.begin()
        logits, cache = self._prefill([row.request.ids for row in rows])
        tokens, largest = _choose(rows, logits)
        if self.rows:
            cache = joined(self._cache, cache)
            tokens = mx.concatenate([self._tokens, tokens])
            largest = mx.concatenate([self._largest, largest])
        self.rows, self._cache = self.rows + rows, cache
        self._tokens, self._largest = tokens, largest
        mx.eval(tokens, largest, [layer.state for layer in cache])
        mx.clear_cache()  # prompts differ in length, so the freed buffers will hardly be reused

    def step(self) -> list[_Row]:
        """Queue the next forward pass, then read the current token of each row; removes and returns finished rows."""
        tokens, largest = self._tokens, self._largest
        if any(len(row.tokens) + 1 < row.max_tokens for row in self.rows):
            logits = self._model(tokens[:, None], self._cache[0].offset, self._cache)[:, -1]  # (B, vocab)
            self._tokens, self._largest = _choose(self.rows, logits)
            mx.async_eval(self._tokens, self._largest)
        self._check(largest)
        unfinished = [row.add(token) for row, token in zip(self.rows, tokens.tolist(), strict=True)]
        finished = [row for row, goes_on in zip(self.rows, unfinished, strict=True) if not goes_on]
        if finished:
            self._select([index for index, goes_on in enumerate(unfinished) if goes_on])
        return finished

    def _prefill(self, prompts: list[Sequence[int]]) -> tuple[mx.array, list[BatchKVCache]]:
        """Logits `(n, vocab)` after the left-padded prompts, and their cache; one chunk of every prompt a pass."""
        longest = max(map(len, prompts))
        padding = [longest - len(ids) for ids in prompts]
        rows = Rows(padding)
        tokens = mx.array([[0] * p + list(ids) for p, ids in zip(padding, prompts, strict=True)])
        cache = [BatchKVCache(rows) for _ in range(self._model.args.n_layers)]
        chunk = max(1, self._chunk // len(prompts))
        for start in range(0, longest, chunk):
            x = self._model.residual(tokens[:, start : start + chunk], start, cache)
            mx.eval([layer.state for layer in cache])
        return self._model.head(plain(x)[:, -1]), cache

    def _select(self, indices: list[int]) -> None:
        self.rows = [self.rows[index] for index in indices]
        if indices:
            self._cache = selected(self._cache, indices)
            self._tokens, self._largest = self._tokens[mx.array(indices)], self._largest[mx.array(indices)]
        else:
            self._cache = []

    def _check(self, largest: mx.array) -> None:
        for row, value in zip(self.rows, largest.tolist(), strict=True):
            if value != value:
                raise nan_error(self._model, [*row.request.ids, *row.tokens])


def _choose(rows: Sequence[_Row], logits: mx.array) -> tuple[mx.array, mx.array]:
    """The next token of each row and its largest logit (NaN if any logit is NaN), `(B,)` each, not evaluated."""
    if all(row.takes_argmax for row in rows):
        tokens = mx.argmax(logits, axis=-1)
    else:
        tokens = mx.concatenate([row.sampler(logits[index : index + 1])[0] for index, row in enumerate(rows)])
    return tokens, logits.max(axis=-1)


def _pop_similar(waiting: list[_Row], count: int, ahead: int) -> list[_Row]:
    """Remove up to `count` rows from `waiting`: the first, and those of the first `ahead` nearest to it in length."""
    first = waiting[0].prompt_length
    chosen = sorted(waiting[:ahead], key=lambda row: abs(row.prompt_length - first))[:count]
    indices = {row.index for row in chosen}
    waiting[:] = [row for row in waiting if row.index not in indices]
    return chosen
