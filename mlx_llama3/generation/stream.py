"""The token stream with the text that it spells, as a caller wants it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_llama3.errors import UserError
from mlx_llama3.generation.decoding import decode, prefill
from mlx_llama3.generation.nan_check import first_nan
from mlx_llama3.generation.sampling import Sampler, Sampling
from mlx_llama3.generation.stop_strings import StopStrings
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

    `text` is what may be shown now: characters whose bytes are not complete, and the beginning of a possible stop
    string, are held back for a later step. All texts joined are the decoded tokens, up to a stop string.
    `finish_reason` is None until the last step: "stop" (a stop id, which is `token`, or a stop string) or "length".
    `logprob` of the token and `top_logprobs`, (id, logprob) best first, are natural logarithms of the model's own
    distribution, before penalties and filters; None unless asked for.
    `norms`, if traced, are those of the positions fed to choose this token: the prompt's for the first one, then that
    of the token before; float32 `(5, n_layers, positions)` in the order of `trace.norms.POINTS`.
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
    stop: Iterable[str] = (),
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
        max_tokens: at most so many; less where the model's context ends. The last step then says "length".
        stop: strings that end the text; they are not part of it.
        logprobs: None for none, n for the chosen token's and the n best.
        cache: from `model.make_cache()`; extended in place. Afterwards it holds the prompt and all tokens, with or
            without the last one: `cache[0].offset` tells.
        history: the ids in `cache`, for the repetition penalty.
        prefill_chunk: positions of the prompt in one pass; bounds the memory of a long prompt.
        on_prefill: called with (done, total) after each chunk of the prompt. What it raises ends the generation.
        trace: give every step its `norms`, taken inside the running pass.
        draft: from `load_draft`, to have the next tokens drafted and checked several a pass; the same tokens come out.
            With a `cache` it needs `history`.
        **sampling: fields of `Sampling`: temperature (0 is greedy), top_k, top_p, min_p, repetition_penalty,
            presence_penalty, frequency_penalty, logit_bias, seed.

    Raises:
        UserError: at the first step, for an option out of range, an empty or too long prompt, an id outside the
            vocabulary, a context that does not fit into memory; at any step, if the model gives NaN, naming the layer.
    """
    cache = model.make_cache() if cache is None else cache
    room = check_prompt(model, ids, cache[0].offset)
    check_counts(max_tokens=max_tokens, prefill_chunk=prefill_chunk)
    last = min(max_tokens, room)
    # An answer that may fill the context is not one that will: room for a beginning is enough then.
    check_context(model, cache, len(ids) + (last if max_tokens < room else min(last, KVCache.STEP)))
    sampler = Sampler(Sampling(**sampling), model.args.vocab_size, [*history, *ids])
    text, stops = tokenizer.detokenizer(), StopStrings(stop)
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
                raise UserError(
                    f"the model gives NaN, first in {first_nan(model, [*history, *ids])}: its weights are damaged, or "
                    "overflow their type; convert it again, or with --dtype bfloat16 or float32"
                )
            token = choice.token.item()
            shown, reason = next_text(token, text, stops, tokenizer.stop_ids, is_last=count == last)
            yield Step(token, shown, reason, *choice.read_logprobs(), capture and capture.read(choice.norms))
            if reason is not None:
                return


def next_text(
    token: int, text: Detokenizer, stops: StopStrings, stop_ids: frozenset[int], *, is_last: bool
) -> tuple[str, str | None]:
    """What may be shown after `token`, and whether and why the answer ends with it."""
    if token in stop_ids:
        shown, _ = stops.add(text.finish())
        return shown + stops.finish(), "stop"
    shown, stopped = stops.add(text.add(token))
    if is_last and not stopped:
        rest, stopped = stops.add(text.finish())
        shown += rest + ("" if stopped else stops.finish())
    return shown, "stop" if stopped else "length" if is_last else None


def _norm_capture(model: Transformer) -> "NormCapture":
    from mlx_llama3.model.hooks.norms import NormCapture  # only tracing needs NumPy, which takes 0.1 s to import

    return NormCapture(model)


def check_prompt(model: Transformer, ids: Sequence[int], before: int = 0) -> int:
    """Positions left for new tokens after the prompt, which has so many before it in a cache.

    Raises UserError for a prompt that cannot be fed.
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
    """Raise UserError, which names the way out, if memory does not suffice for `new` more positions in `cache`."""
    layer, end = cache[0], cache[0].offset + new
    held = sum(array.nbytes for array in layer.state)
    attention = model.layers[0].attention  # where heads are shared out to several machines, it has those of this one
    args = replace(model.args, n_heads=attention.n_heads, n_kv_heads=attention.n_kv_heads)
    grown = layer_bytes(layer, args, model.norm.weight.dtype, end)
    hint = SHORTEN
    if type(layer) is KVCache:
        hint += ", or keep the cache in fewer bits (--kv-bits 8)"
    check_memory(len(cache) * max(0, grown - held), f"a context of {end} tokens", hint, available=free_memory())


def check_counts(**counts: int) -> None:
    """Raise UserError for one that is not a whole number of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{name} is {value}; it must be a whole number of at least 1")
