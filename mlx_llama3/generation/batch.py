"""Many prompts at once: one pass of the model serves a token of each, and weights are read once for all of them.

Rows enter and leave the running batch as they begin and end (continuous batching; Orca, Yu et al., OSDI 2022). Each
answer is what `generate` gives for its prompt alone: positions, noise, penalties and stops are the row's own. One
limit: a product of several rows rounds differently, by some 1e-6 of a logit; where two tokens are closer than that, an
answer may turn out the other way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mlx_llama3.errors import UserError
from mlx_llama3.generation.nan_check import first_nan
from mlx_llama3.generation.sampling import Sampler, Sampling
from mlx_llama3.generation.stop_strings import StopStrings
from mlx_llama3.generation.stream import SHORTEN, check_counts, check_prompt, next_text
from mlx_llama3.model.cache.batch import BatchKVCache, Rows, joined, selected
from mlx_llama3.model.cache.memory import context_bytes
from mlx_llama3.model.residual import plain
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.system.memory import check_memory, free_memory
from mlx_llama3.tokenizer.tokenizer import Tokenizer

import mlx.core as mx

AHEAD = 4  # batches of waiting prompts among which those of like length are sought


@dataclass(frozen=True)
class Request:
    """A prompt and how to answer it, as `generate` takes them: `ids`, `max_tokens`, `stop`, and the sampling."""

    ids: Sequence[int]
    max_tokens: int = 256
    stop: Sequence[str] = ()
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, their text, and why it ended: "stop" or "length"."""

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

    They begin in about their order: with the one that waits longest, those enter that are nearest to it in length, of
    the next few. prefill_chunk: tokens of prompts in one pass.

    Raises `UserError` at the first step, for a request that `generate` would refuse (check it with `check_prompt` to
    tell which); at any step if the model gives NaN.
    """
    check_counts(batch_size=batch_size, prefill_chunk=prefill_chunk)
    waiting = [_Row(index, request, model, tokenizer) for index, request in enumerate(requests)]
    batch = _Batch(model, prefill_chunk)
    while waiting or batch.rows:
        free = batch_size - len(batch.rows)
        # A prefill holds up those that run: a few rows at a time are let in, not each as another one leaves.
        if waiting and (not batch.rows or free >= min(len(waiting), max(1, batch_size // 4))):
            batch.admit(_alike(waiting, free, AHEAD * batch_size))
        for row in batch.step():
            yield row.index, row.answer()


def largest_batch(model: Transformer, requests: Sequence[Request], asked: int) -> int:
    """How many rows, at most `asked`, have their keys and values in the memory that there is.

    Raises `UserError` if the longest of the requests alone has not.
    """
    longest = max(min(len(request.ids) + request.max_tokens, model.args.max_seq_len) for request in requests)
    needed = context_bytes(model.args, model.norm.weight.dtype, longest)
    room = int(0.7 * free_memory())  # a row that enters or leaves has its buffers copied, and passes need some too
    check_memory(needed, f"an answer of {longest} tokens with its prompt", SHORTEN, available=room)
    return min(asked, room // needed)


class _Row:
    """One answer in the making."""

    def __init__(self, index: int, request: Request, model: Transformer, tokenizer: Tokenizer) -> None:
        check_counts(max_tokens=request.max_tokens)
        self.index, self.request = index, request
        self.last = min(request.max_tokens, check_prompt(model, request.ids))
        self.tokens: list[int] = []
        self._texts: list[str] = []
        self._reason: str | None = None
        self._text, self._stops, self._stop_ids = tokenizer.detokenizer(), StopStrings(request.stop), tokenizer.stop_ids
        self._vocab_size = model.args.vocab_size
        self.sampler: Sampler | None = None

    @property
    def length(self) -> int:
        return len(self.request.ids)

    @property
    def is_plain(self) -> bool:
        """Whether its next token is the best one of the logits as they are."""
        how = self.request.sampling
        return how.greedy and not how.penalizes and not how.logit_bias

    def begin(self) -> None:
        """Make what only a running row needs."""
        self.sampler = Sampler(self.request.sampling, self._vocab_size, self.request.ids)

    def add(self, token: int) -> bool:
        """Take a token; whether the answer goes on."""
        self.tokens.append(token)
        is_last = len(self.tokens) == self.last
        shown, self._reason = next_text(token, self._text, self._stops, self._stop_ids, is_last=is_last)
        self._texts.append(shown)
        return self._reason is None

    def answer(self) -> Answer:
        return Answer(self.tokens, "".join(self._texts), self._reason)


class _Batch:
    """The rows that run, their cache, and the token of each that is queued and perhaps not computed yet."""

    def __init__(self, model: Transformer, prefill_chunk: int) -> None:
        self.rows: list[_Row] = []
        self._model, self._chunk = model, prefill_chunk
        self._cache: list[BatchKVCache] = []
        self._tokens = self._largest = mx.array([])  # (B,) each

    def admit(self, rows: list[_Row]) -> None:
        """Read the prompts of more rows, and queue the first token of each."""
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
        mx.clear_cache()  # prompts are of all lengths: what was freed will hardly fit again

    def step(self) -> list[_Row]:
        """Read the token of each row, with the next one queued meanwhile; returns the rows that end, and drops them."""
        tokens, largest = self._tokens, self._largest
        if any(len(row.tokens) + 1 < row.last for row in self.rows):
            logits = self._model(tokens[:, None], self._cache[0].offset, self._cache)[:, -1]  # (B, vocab)
            self._tokens, self._largest = _choose(self.rows, logits)
            mx.async_eval(self._tokens, self._largest)
        self._check(largest)
        goes_on = [row.add(token) for row, token in zip(self.rows, tokens.tolist(), strict=True)]
        ended = [row for row, more in zip(self.rows, goes_on, strict=True) if not more]
        if ended:
            self._keep([place for place, more in enumerate(goes_on) if more])
        return ended

    def _prefill(self, prompts: list[Sequence[int]]) -> tuple[mx.array, list[BatchKVCache]]:
        """Logits `(n, vocab)` after the prompts, and their cache; some tokens of all of them a pass."""
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

    def _keep(self, places: list[int]) -> None:
        self.rows = [self.rows[place] for place in places]
        if places:
            self._cache = selected(self._cache, places)
            self._tokens, self._largest = self._tokens[mx.array(places)], self._largest[mx.array(places)]
        else:
            self._cache = []

    def _check(self, largest: mx.array) -> None:
        for row, value in zip(self.rows, largest.tolist(), strict=True):
            if value != value:
                where = first_nan(self._model, [*row.request.ids, *row.tokens])
                raise UserError(
                    f"the model gives NaN, first in {where}: its weights are damaged, or overflow their type; convert "
                    "it again, or with --dtype bfloat16 or float32"
                )


def _choose(rows: Sequence[_Row], logits: mx.array) -> tuple[mx.array, mx.array]:
    """The next token of each row, and the largest of its logits (NaN if one is), `(B,)` each; none is waited for."""
    if all(row.is_plain for row in rows):
        tokens = mx.argmax(logits, axis=-1)
    else:
        tokens = mx.concatenate([row.sampler(logits[place : place + 1])[0] for place, row in enumerate(rows)])
    return tokens, logits.max(axis=-1)


def _alike(waiting: list[_Row], count: int, ahead: int) -> list[_Row]:
    """Take `count` rows from those that wait: the first, and of the next `ahead` those nearest to it in length."""
    first = waiting[0].length
    chosen = sorted(waiting[:ahead], key=lambda row: abs(row.length - first))[:count]
    taken = {row.index for row in chosen}
    waiting[:] = [row for row in waiting if row.index not in taken]
    return chosen
