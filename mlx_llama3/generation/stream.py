"""`generate`: the stream of tokens with their text, and the checks of its arguments."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_llama3.errors import UserError
from mlx_llama3.generation.decoding import decode, prefill
from mlx_llama3.generation.nan_check import nan_error
from mlx_llama3.generation.sampling import Sampler, Sampling
from mlx_llama3.generation.stop_strings import StopStrings, all_stop_ids
from mlx_llama3.model.cache.double_buffered import DoubleBufferedKVCache
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.memory import layer_bytes
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.system.memory import check_memory, free_memory
from mlx_llama3.tokenizer.detokenizer import Detokenizer
from mlx_llama3.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np

    from mlx_llama3.generation.speculative.speculation import Speculation
    from mlx_llama3.model.hooks.norms import NormCapture


SHORTEN = "shorten the prompt or the longest answer (--max-tokens)"


@dataclass(frozen=True)
class Step:
    """One generated token.

    text: what can be printed now. Incomplete UTF-8 characters, and the beginning of a possible stop string, are delayed
    to a later step. All texts joined are the decoded tokens, up to a stop string.
    finish_reason: None until the last step, then "stop" (a stop id, which is `token`, or a stop string) or "length".
    logprob, top_logprobs: natural logarithms under the model's own distribution, before penalties and filters; of the
    token, and as (id, logprob), best first. None unless requested.
    norms: with `trace=True`, the norms of the positions run to choose this token: all of the prompt for the first
    token, then that of the previous token; float32 `(5, n_layers, positions)` in the order of `hooks.norms.POINTS`.
    """

    token: int
    text: str
    finish_reason: str | None = None
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    norms: "np.ndarray | None" = None


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    max_tokens: int = 256,
    stop: Sequence[str] = (),
    logprobs: int | None = None,
    cache: list[KVCache] | None = None,
    history: Sequence[int] = (),
    prefill_chunk: int = 512,
    on_prefill: Callable[[int, int], None] | None = None,
    trace: bool = False,
    draft: "Speculation | None" = None,
    **sampling: Any,
) -> Iterator[Step]:
    """Continue `ids`, token by token.

    Args:
        ids: the prompt; with a `cache`, only the tokens that are not in it yet.
        max_tokens: the most tokens to generate; fewer if the context window ends first. Either way the last step's
            finish_reason is "length".
        stop: strings that end the text; they are not part of it. The name of a control token stands for the token.
        logprobs: n gives every step the log-probabilities of its token and of the n best; None gives none.
        cache: from `model.make_cache()`; extended in place. Afterwards it contains the prompt and all tokens, with or
            without the last one: see `cache[0].offset`.
        history: the ids in `cache`, for the repetition penalty.
        prefill_chunk: prompt positions per forward pass; bounds the memory of a long prompt.
        on_prefill: called with (done, total) after each chunk of the prompt. An exception in it ends the generation.
        trace: give every step its `norms`, computed in the same forward pass.
        draft: from `load_draft`, for speculative decoding; the tokens stay the same. With a `cache` it needs `history`.
        **sampling: fields of `Sampling`: temperature (0 is greedy), top_k, top_p, min_p, repetition_penalty,
            presence_penalty, frequency_penalty, logit_bias, seed.

    Raises:
        UserError: at the first step, for an option out of range, an empty or too long prompt, an id outside the
            vocabulary, a context that does not fit into memory; at any step, if the model gives NaN, with the layer.
    """
    cache = model.make_cache() if cache is None else cache
    room = check_prompt(model, ids, cache[0].offset)
    check_counts(max_tokens=max_tokens, prefill_chunk=prefill_chunk)
    last = min(max_tokens, room)
    # An answer limited only by the context window seldom fills it, so memory for its beginning is enough.
    check_context(model, cache, len(ids) + (last if max_tokens < room else min(last, KVCache.STEP)))
    sampler = Sampler(Sampling(**sampling), model.args.vocab_size, [*history, *ids])
    detokenizer, stops = tokenizer.detokenizer(), StopStrings(stop)
    stop_ids = all_stop_ids(tokenizer, stop)
    capture = _norm_capture(model) if trace else None
    runner = capture.model if capture else model
    if draft is not None:
        on_chunk = partial(on_prefill, 0, len(ids)) if on_prefill else lambda: None
        draft.begin([*history, *ids], cache, len(ids), chunk=prefill_chunk, on_chunk=on_chunk)
    logits = prefill(runner, ids, cache, chunk=prefill_chunk, on_prefill=on_prefill, capture=capture)
    loop = decode if draft is None else draft.decode
    with closing(loop(runner, logits, cache, sampler, count=last, logprobs=logprobs, capture=capture)) as choices:
        for count, choice in enumerate(choices, start=1):
            if choice.is_nan:
                raise nan_error(model, [*history, *ids])
            token = choice.token.item()
            text, reason = next_text(token, detokenizer, stops, stop_ids, is_last=count == last)
            yield Step(token, text, reason, *choice.read_logprobs(), capture and capture.read(choice.norms))
            if reason is not None:
                return


def next_text(
    token: int, detokenizer: Detokenizer, stops: StopStrings, stop_ids: frozenset[int], *, is_last: bool
) -> tuple[str, str | None]:
    """The text that can be printed after `token`, and the finish reason if the answer ends with it."""
    if token in stop_ids:
        text, _ = stops.add(detokenizer.finish())
        return text + stops.finish(), "stop"
    text, stopped = stops.add(detokenizer.add(token))
    if is_last and not stopped:
        rest, stopped = stops.add(detokenizer.finish())
        text += rest + ("" if stopped else stops.finish())
    return text, "stop" if stopped else "length" if is_last else None


def _norm_capture(model: Transformer) -> "NormCapture":
    from mlx_llama3.model.hooks.norms import NormCapture  # only tracing needs NumPy, which takes 0.1 s to import

    return NormCapture(model)


def check_prompt(model: Transformer, ids: Sequence[int], before: int = 0) -> int:
    """Positions left in the context window after the prompt. before: positions already in the cache.

    Raises UserError for an empty prompt, an id outside the vocabulary, and a prompt that fills the context.
    """
    if not len(ids):
        raise UserError("the prompt is empty: there is nothing to continue")
    vocab_size, context = model.args.vocab_size, model.args.max_seq_len
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UserError(f"token id {token} is not in the vocabulary of 0 to {vocab_size - 1}")
    used = before + len(ids)
    if used >= context:
        raise UserError(f"{used} tokens leave no room in the model's context of {context}; shorten the prompt")
    return context - used


def check_context(model: Transformer, cache: Sequence[KVCache], new: int) -> None:
    """Raise UserError, with a hint on what to change, if `new` more positions in `cache` do not fit into memory."""
    layer, end = cache[0], cache[0].offset + new
    allocated = sum(array.nbytes for array in layer.state)
    attention = model.layers[0].attention  # its head counts are this rank's, under tensor parallelism
    args = replace(model.args, n_heads=attention.n_heads, n_kv_heads=attention.n_kv_heads)
    grown = layer_bytes(layer, args, model.norm.weight.dtype, end)
    hint = SHORTEN
    if type(layer) in (KVCache, DoubleBufferedKVCache):
        hint += ", or keep the cache in fewer bits (--kv-bits 8)"
    check_memory(len(cache) * max(0, grown - allocated), f"a context of {end} tokens", hint, available=free_memory())


def check_counts(**counts: int) -> None:
    """Raise UserError for an argument that is not a whole number of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{name} is {value}; it must be a whole number of at least 1")
