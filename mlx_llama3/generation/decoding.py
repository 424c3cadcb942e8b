"""The loop over token ids: chunked prefill, then decoding with two steps in flight."""

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
    """A sampled token, queued and perhaps not computed yet: `token`, and the `largest` of the logits, `(1,)` each.

    `logprob` `(1, 1)` and `top` (ids and log-probabilities, `(1, n)` each) if asked for; `norms` of the passes that led
    to it if traced.
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
        """All that there is to compute."""
        parts = (self.token, self.largest, self.logprob, *(self.top or ()))
        squares = [square for pending in self.norms for square in pending.squares]
        return [part for part in parts if part is not None] + squares

    @property
    def is_nan(self) -> bool:
        """Whether a logit was no number; waits for them."""
        return self.largest.item() != self.largest.item()

    def read_logprobs(self) -> tuple[float | None, list[tuple[int, float]] | None]:
        """(logprob, top_logprobs) as `Step` has them."""
        top = None
        if self.top is not None:
            ids, values = self.top
            top = list(zip(ids[0].tolist(), values[0].tolist(), strict=True))
        return (None if self.logprob is None else self.logprob.item()), top


def prefill(
    model: Transformer,
    ids: Sequence[int],
    cache: list[KVCache],
    *,
    chunk: int = 512,
    on_prefill: Callable[[int, int], None] | None = None,
    capture: "NormCapture | None" = None,
) -> mx.array:
    """Feed `ids` to the model, `chunk` positions a pass; logits `(1, vocab)` after the last one, not yet evaluated.

    `on_prefill` is told (done, total) after each. The head is applied to the last position only: for a vocabulary of
    128k it would cost as much as a quarter of a 1B model.
    """
    start, done = cache[0].offset, 0
    while done < len(ids):
        length = fitting_chunk(chunk, start + done + chunk, model.args.n_heads)
        piece = mx.array([ids[done : done + length]])
        x = plain(model.residual(piece, start + done, cache))
        done += piece.shape[1]
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
    """`count` choices, the first from `logits` `(1, vocab)`.

    The graph of the next one is built and queued before this one is handed out, so that the device does not wait for
    the host to read, decode and print.
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
    """The next token of logits `(1, vocab)`; `norms` are those of the passes since the last choice."""
    token, distribution = sampler(logits)
    # One NaN makes the maximum NaN, whatever token was drawn; read beside the token, it costs no wait of its own.
    largest = logits.max(axis=-1)
    norms = capture.take() if capture else []
    if logprobs is None:
        return TokenChoice(token, largest, None, None, norms)
    logprob = mx.take_along_axis(distribution, token[:, None], axis=-1)
    return TokenChoice(token, largest, logprob, top_logprobs(distribution, logprobs) if logprobs else None, norms)
