"""`run`: generate from ids and return a trace, with the requested states as NumPy arrays.

trace = mlx_llama3.trace.run(model, tokenizer, ids, max_tokens=40, save=("residuals", "attention"))
trace.norm("mlp_out")[3, -1], trace.extra["attention/5"][2]
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlx_llama3.errors import UserError
from mlx_llama3.generation.stream import Step, generate
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.model.hooks.norms import POINTS, NormCapture
from mlx_llama3.model.hooks.taps import tapped
from mlx_llama3.model.residual import plain
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.system.memory import check_memory
from mlx_llama3.tokenizer.tokenizer import Tokenizer
from mlx_llama3.trace.attention import attention_pattern
from mlx_llama3.trace.store import MAX_BYTES, Trace

import mlx.core as mx

SAVE = ("norms", "residuals", "logits", "attention")
FLOAT32 = 4


def run(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    max_tokens: int = 256,
    save: Sequence[str] = ("norms",),
    name: str = "",
    prefill_chunk: int = 512,
    on_step: Callable[[Step], None] | None = None,
    **options: Any,
) -> Trace:
    """Continue `ids` and return the trace of prompt and answer, including the answer's last token.

    Args:
        model: the model, or an edited one (`trace.edited`).
        max_tokens: as for `generate`; 0 traces the prompt alone.
        save: names from `SAVE`. Norms are always saved, and computed during generation. The others are float32, from
            one more forward pass over the finished sequence: "residuals" is `resid_post` `(L, T, dim)`, "logits"
            `(T, vocab)`, "attention" one `attention/N` `(n_heads, T, T)` a layer.
        name: the model's name in the trace.
        on_step: called with every step of the generation.
        **options: of `generate`: stop, temperature, seed, ...

    Raises:
        UserError: before anything runs, if `save` has an unknown name or the trace does not fit into memory; what
            `generate` raises.
    """
    wanted = _checked(save, max_tokens)
    _check_memory(model.args, min(len(ids) + max_tokens, model.args.max_seq_len), wanted)
    tokens, norms, reason = _generated(model, tokenizer, ids, max_tokens, prefill_chunk, on_step, options)
    settings = {"prompt_tokens": len(ids), "max_tokens": max_tokens, "finish_reason": reason} | _to_json(options)
    trace = Trace.empty(name, model.args.n_layers, settings)
    trace.extend(tokens, [piece(tokenizer, token) for token in tokens], norms)
    trace.extra = _extras(model, tokens, wanted, prefill_chunk)
    return trace


def piece(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token as a label, with `\\ufffd` for an incomplete character."""
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def estimate(args: ModelArgs, length: int, save: Sequence[str]) -> int:
    """Bytes to make and store a trace of `length` tokens with `save`."""
    stream = args.n_layers * length * args.dim
    pattern = args.n_heads * length * length
    floats = len(POINTS) * args.n_layers * length
    # Attention also needs the stream and, one layer at a time, the scores, their softmax and its copy.
    floats += stream if {"residuals", "attention"} & set(save) else 0
    floats += length * args.vocab_size if "logits" in save else 0
    floats += (args.n_layers + 3) * pattern if "attention" in save else 0
    return floats * FLOAT32


def _checked(save: Sequence[str], max_tokens: int) -> frozenset[str]:
    for name in save:
        if name not in SAVE:
            raise UserError(f"{name!r} cannot be saved in a trace; choose of {', '.join(SAVE)}")
    if max_tokens < 0:
        raise UserError(f"max_tokens is {max_tokens}; it must be a whole number of at least 0")
    return frozenset(save)


def _check_memory(args: ModelArgs, length: int, wanted: frozenset[str]) -> None:
    needed = estimate(args, length, sorted(wanted))
    name = f"a trace of {length} tokens with {', '.join(sorted(wanted))}"
    if needed > MAX_BYTES:
        raise UserError(f"{name} is {needed / 1e9:.1f} GB; more than {MAX_BYTES >> 30} GB cannot be opened again")
    check_memory(needed, name, "save less, or fewer tokens")


def _generated(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    max_tokens: int,
    chunk: int,
    on_step: Callable[[Step], None] | None,
    options: dict[str, Any],
) -> tuple[list[int], np.ndarray, str | None]:
    """All ids of prompt and answer, their norms `(5, L, T)`, and the finish reason."""
    tokens, norms, reason, cache = list(ids), [], None, model.make_cache()
    steps = generate(
        model, tokenizer, ids, max_tokens=max(max_tokens, 1), cache=cache, prefill_chunk=chunk, trace=True, **options
    )
    for step in steps:
        norms.append(step.norms)
        if max_tokens:
            tokens.append(step.token)
            reason = step.finish_reason
            if on_step:
                on_step(step)
    if max_tokens:
        norms.append(_last_norms(model, tokens, cache))
    return tokens, np.concatenate(norms, axis=-1), reason


def _last_norms(model: Transformer, tokens: list[int], cache: list[KVCache]) -> np.ndarray:
    """Norms `(5, L, 1)` of the last token, which generation need not run through the model."""
    for entry in cache:
        entry.trim(entry.offset - (len(tokens) - 1))
    capture = NormCapture(model)
    plain(capture.model.residual(mx.array([tokens[-1:]]), len(tokens) - 1, cache))  # `plain` makes the last add
    return capture.read(capture.take())


def _extras(model: Transformer, tokens: list[int], wanted: frozenset[str], chunk: int) -> dict[str, np.ndarray]:
    if wanted <= {"norms"}:
        return {}
    extra: dict[str, np.ndarray] = {}
    stream, logits = _second_pass(model, tokens, wanted, chunk)
    if "residuals" in wanted:
        extra["resid_post"] = stream
    if "logits" in wanted:
        extra["logits"] = logits
    if "attention" in wanted:
        before = np.asarray(model.tok_embeddings(mx.array(tokens)).astype(mx.float32))  # (T, dim)
        dtype = model.norm.weight.dtype
        for layer in range(model.args.n_layers):
            extra[f"attention/{layer}"] = attention_pattern(model, mx.array(before).astype(dtype), layer)
            before = stream[layer]
    return extra


def _second_pass(
    model: Transformer, tokens: list[int], wanted: frozenset[str], chunk: int
) -> tuple[np.ndarray, np.ndarray]:
    """`resid_post` `(L, T, dim)` and logits `(T, vocab)`, each empty if not wanted; `chunk` positions a pass."""
    args, length = model.args, len(tokens)
    stream = np.empty((args.n_layers, length, args.dim) if {"residuals", "attention"} & wanted else 0, np.float32)
    logits = np.empty((length, args.vocab_size) if "logits" in wanted else 0, np.float32)
    resid_post: dict[int, mx.array] = {}

    def store(layer: int, _name: str, value: mx.array) -> mx.array:
        resid_post[layer] = value
        return value

    watched, cache = tapped(model, store, names=("resid_post",)), model.make_cache()
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        final = watched.residual(mx.array([tokens[start:end]]), start, cache)
        if stream.size:
            for layer, value in resid_post.items():
                stream[layer, start:end] = np.asarray(value[0].astype(mx.float32))
        if logits.size:
            logits[start:end] = np.asarray(model.head(final[0]).astype(mx.float32))
        mx.eval([entry.state for entry in cache])
    return stream, logits


def _to_json(options: dict[str, Any]) -> dict[str, Any]:
    """Options with values that JSON can represent."""
    return {
        key: value if isinstance(value, int | float | str | dict | None) else list(value)
        for key, value in options.items()
    }
