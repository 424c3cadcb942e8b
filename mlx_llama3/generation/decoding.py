"""The decoding loop: chunked prefill, then one token a step with two steps in flight."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_llama3.generation.sampling import Sampler, top_logprobs
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.layers.attention import fitting_chunk
from mlx_llama3.model.residual import plain
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx

if TYPE_CHECKING:
    from mlx_llama3.model.hooks.norms import NormCapture, PendingNorms


@dataclass(frozen=True)
class TokenChoice:
    """A sampled token, queued and perhaps not computed yet.

    token: `(1,)`. largest: the maximum of its logits, `(1,)`. logprob: `(1, 1)`, and top: ids and log-probabilities,
    `(1, n)` each; None unless requested. norms: those of the forward passes since the previous token, empty unless
    traced.
    """

    token: mx.array
    largest: mx.array
    logprob: mx.array | None
    top: tuple[mx.array, mx.array] | None
    norms: list["PendingNorms"]

    def start(self) -> "TokenChoice":
        """Queue the computation and return at once."""
        mx.async_eval(self.arrays())
        return self

    def arrays(self) -> list[mx.array]:
        """All arrays of this choice, for `mx.eval`."""
        arrays = (self.token, self.largest, self.logprob, *(self.top or ()))
        squares = [square for pending in self.norms for square in pending.squares]
        return [array for array in arrays if array is not None] + squares

    @property
    def is_nan(self) -> bool:
        """Whether a logit was NaN; waits for the result."""
        return self.largest.item() != self.largest.item()

    def read_logprobs(self) -> tuple[float | None, list[tuple[int, float]] | None]:
        """(logprob, top_logprobs) in the form of `Step`'s fields."""
        top = None
        if self.top is not None:
            ids, values = self.top
            top = [(int(token), float(value)) for token, value in zip(ids[0].tolist(), values[0].tolist(), strict=True)]
        return (None if self.logprob is None else float(self.logprob.item())), top


def prefill(
    model: Transformer,
    ids: Sequence[int],
    cache: list[KVCache],
    *,
    chunk: int = 512,
    on_prefill: Callable[[int, int], None] | None = None,
    capture: "NormCapture | None" = None,
) -> mx.array:
    """Run `ids` through the model, `chunk` positions a pass; returns the last logits `(1, vocab)`, not yet evaluated.

    `on_prefill(done, total)` is called after each chunk. The head is applied to the last position only: for a
    vocabulary of 128k it would cost as much as a quarter of a 1B model.
    """
    start, done = cache[0].offset, 0
    while done < len(ids):
        length = fitting_chunk(chunk, start + done + chunk, model.args.n_heads)
        tokens = mx.array([ids[done : done + length]])
        x = plain(model.residual(tokens, start + done, cache))
        done += tokens.shape[1]
        if done < len(ids):
            mx.eval([entry.state for entry in cache], capture.arrays() if capture else [])
            mx.clear_cache()
        if on_prefill is not None:
            on_prefill(done, len(ids))
    return model.head(x[:, -1])


def decode(
    model: Transformer,
    logits: mx.array,
    cache: list[KVCache],
    sampler: Sampler,
    *,
    count: int,
    logprobs: int | None = None,
    capture: "NormCapture | None" = None,
) -> Iterator[TokenChoice]:
    """Yield `count` tokens, the first sampled from `logits` `(1, vocab)`.

    The next token's graph is built and queued before the current one is yielded, so that the device does not wait
    while the host reads, decodes and prints.
    """
    choice = choose(logits, sampler, logprobs, capture).start()
    for left in reversed(range(count)):
        following = None
        if left:
            logits = model(choice.token[:, None], cache[0].offset, cache)[:, -1]  # (1, vocab)
            following = choose(logits, sampler, logprobs, capture).start()
        yield choice
        choice = following


def choose(logits: mx.array, sampler: Sampler, logprobs: int | None, capture: "NormCapture | None") -> TokenChoice:
    """Sample from logits `(1, vocab)`; the choice's `norms` are those captured since the previous choice."""
    token, distribution = sampler(logits)
    # The maximum is NaN if any logit is, whatever token was drawn. Reading it with the token costs no extra wait.
    largest = logits.max(axis=-1)
    norms = capture.take() if capture else []
    if logprobs is None:
        return TokenChoice(token, largest, None, None, norms)
    logprob = mx.take_along_axis(distribution, token[:, None], axis=-1)
    return TokenChoice(token, largest, logprob, top_logprobs(distribution, logprobs) if logprobs else None, norms)
