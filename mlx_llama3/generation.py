"""The token stream: chunked prefill, double-buffered decode, and the text that the tokens spell."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_llama3.cache import KVCache
from mlx_llama3.diagnosis import first_nan
from mlx_llama3.errors import UserError
from mlx_llama3.model import Transformer
from mlx_llama3.sampling import Sampler, Sampling, top_logprobs
from mlx_llama3.stop_strings import StopStrings
from mlx_llama3.tokenizer import Tokenizer


@dataclass(frozen=True)
class Step:
    """One generated token.

    `text` is what may be shown now: characters whose bytes are not complete, and the beginning of a possible stop
    string, are held back for a later step. All texts joined are the decoded tokens, up to a stop string.
    `finish_reason` is None until the last step: "stop" (a stop id, which is `token`, or a stop string) or "length".
    `logprob` of the token and `top_logprobs`, (id, logprob) best first, are natural logarithms of the model's own
    distribution, before penalties and filters; None unless asked for.
    """

    token: int
    text: str
    finish_reason: str | None = None
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    max_tokens: int = 256,
    stop: Iterable[str] = (),
    logprobs: int | None = None,
    cache: list[KVCache] | None = None,
    history: Sequence[int] = (),
    prefill_chunk: int = 512,
    on_prefill: Callable[[int, int], None] | None = None,
    **sampling: Any,
) -> Iterator[Step]:
    """Continue `ids`, token by token.

    Args:
        ids: the prompt; with a `cache`, only the tokens that are not in it yet.
        max_tokens: at most so many; less where the model's context ends. The last step then says "length".
        stop: strings that end the text; they are not part of it.
        logprobs: None for none, n for the chosen token's and the n best.
        cache: from `model.make_cache()`; extended in place. Afterwards it holds the prompt and all tokens, with or
            without the last one: `cache[0].offset` tells.
        history: the ids in `cache`, for the repetition penalty.
        prefill_chunk: positions of the prompt in one pass; bounds the memory of a long prompt.
        on_prefill: called with (done, total) after each chunk of the prompt. What it raises ends the generation.
        **sampling: fields of `Sampling`: temperature (0 is greedy), top_k, top_p, min_p, repetition_penalty,
            presence_penalty, frequency_penalty, logit_bias, seed.

    Raises:
        UserError: at the first step, for an option out of range, an empty or too long prompt, an id outside the
            vocabulary; at any step, if the model gives NaN, naming the layer.
    """
    cache = model.make_cache() if cache is None else cache
    room = _room(model, ids, cache)
    _check_counts(max_tokens=max_tokens, prefill_chunk=prefill_chunk)
    last = min(max_tokens, room)
    sampler = Sampler(Sampling(**sampling), model.args.vocab_size, [*history, *ids])
    text, stops = tokenizer.detokenizer(), StopStrings(stop)
    logits = prefill(model, ids, cache, prefill_chunk, on_prefill)
    for count, choice in enumerate(_decode(model, logits, sampler, cache, last, logprobs), start=1):
        token, chosen = choice.read()
        if token is None:
            raise UserError(
                f"the model gives NaN, first in {first_nan(model, [*history, *ids])}: its weights are damaged, or "
                "overflow their type; convert it again, or with --dtype bfloat16 or float32"
            )
        if token in tokenizer.stop_ids:
            shown, _ = stops.add(text.finish())
            yield Step(token, shown + stops.finish(), "stop", *chosen)
            return
        shown, stopped = stops.add(text.add(token))
        if count == last and not stopped:
            rest, stopped = stops.add(text.finish())
            shown += rest + ("" if stopped else stops.finish())
        yield Step(token, shown, "stop" if stopped else "length" if count == last else None, *chosen)
        if stopped:
            return


def prefill(
    model: Transformer,
    ids: Sequence[int],
    cache: list[KVCache],
    chunk: int = 512,
    on_prefill: Callable[[int, int], None] | None = None,
) -> mx.array:
    """Feed `ids` to the model, `chunk` positions a pass; logits `(1, vocab)` after the last one, not yet evaluated.

    The head is applied to the last position only: for 128k entries it would cost as much as a quarter of a 1B model.
    """
    start = cache[0].offset
    for begin in range(0, len(ids), chunk):
        piece = mx.array([ids[begin : begin + chunk]])
        x = model.residual(piece, start + begin, cache)
        done = begin + piece.shape[1]
        if done < len(ids):
            mx.eval([entry.state for entry in cache])
            mx.clear_cache()
        if on_prefill is not None:
            on_prefill(done, len(ids))
    return model.head(x[:, -1])


@dataclass(frozen=True)
class _Choice:
    """A sampled token on its way: `token` and its `logit`, `(1,)` each, and what was asked about probabilities."""

    token: mx.array
    logit: mx.array
    logprob: mx.array | None
    top: tuple[mx.array, mx.array] | None

    def arrays(self) -> list[mx.array]:
        return [a for a in (self.token, self.logit, self.logprob, *(self.top or ())) if a is not None]

    def read(self) -> tuple[int | None, tuple[float | None, list[tuple[int, float]] | None]]:
        """Wait for the values: id (None if the logits were NaN), (logprob, top_logprobs)."""
        if self.logit.item() != self.logit.item():
            return None, (None, None)
        top = None
        if self.top is not None:
            best, values = self.top
            top = list(zip(best[0].tolist(), values[0].tolist(), strict=True))
        return self.token.item(), (None if self.logprob is None else self.logprob.item(), top)


def _decode(
    model: Transformer, logits: mx.array, sampler: Sampler, cache: list[KVCache], count: int, logprobs: int | None
) -> Iterator[_Choice]:
    """`count` choices; the graph of the next one is built and queued before this one is handed out to be read."""
    choice = _choose(logits, sampler, logprobs)
    mx.async_eval(*choice.arrays())
    for left in reversed(range(count)):
        following = None
        if left:
            logits = model(choice.token[:, None], cache[0].offset, cache)[:, -1]  # (1, vocab)
            following = _choose(logits, sampler, logprobs)
            mx.async_eval(*following.arrays())
        yield choice
        choice = following


def _choose(logits: mx.array, sampler: Sampler, logprobs: int | None) -> _Choice:
    token, distribution = sampler(logits)
    # Read beside the token, so that a NaN is noticed at no cost instead of coming out as token 0.
    logit = mx.take_along_axis(logits, token[:, None], axis=-1)
    if logprobs is None:
        return _Choice(token, logit, None, None)
    logprob = mx.take_along_axis(distribution, token[:, None], axis=-1)
    return _Choice(token, logit, logprob, top_logprobs(distribution, logprobs) if logprobs else None)


def _room(model: Transformer, ids: Sequence[int], cache: list[KVCache]) -> int:
    """Positions left for new tokens after the prompt; raises UserError for a prompt that cannot be fed."""
    if not len(ids):
        raise UserError("the prompt is empty: there is nothing to continue")
    vocab_size, context = model.args.vocab_size, model.args.max_seq_len
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UserError(f"token id {token} is not in the vocabulary of 0 to {vocab_size - 1}")
    used = cache[0].offset + len(ids)
    if used >= context:
        raise UserError(f"{used} tokens leave no room in the model's context of {context}; shorten the prompt")
    return context - used


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{name} is {value}; it must be a whole number of at least 1")
