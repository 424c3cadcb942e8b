"""Perplexity of a model folder on a text: exp of the mean negative log-likelihood of its tokens."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from convert.verification.sample_text import TEXT
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.errors import UserError
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.tokenizer.tokenizer import load_tokenizer

import mlx.core as mx

# Positions per pass: the logits of 256 positions of Llama 3 take 130 MB in float32.
_CHUNK = 256
_CONTEXT = 2048


@dataclass(frozen=True)
class Perplexity:
    """The result for `tokens` scored tokens.

    `nll` is their mean negative log-likelihood in nats, `error` its standard error.
    """

    tokens: int
    windows: int
    nll: float
    error: float

    @property
    def value(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll)

    def __str__(self) -> str:
        error = self.value * self.error
        return f"perplexity {self.value:.4f} +- {error:.4f} over {self.tokens} tokens in {self.windows} windows"


def perplexity(
    folder: Path | str,
    *,
    text: str | None = None,
    context: int | None = None,
    stride: int | None = None,
    progress: bool = True,
) -> Perplexity:
    """Measure the perplexity of a model folder.

    Windows of `context` tokens begin every `stride` tokens. Each scores only the tokens that the window before did not,
    so with a small stride every token has a long context. If the model expects a BOS token, one is put before each
    window, in addition to its `context` tokens.

    Args:
        folder: a model folder with its tokenizer.
        text: None takes the built-in one (`sample_text.TITLE`).
        context: tokens per window; with the BOS token, at most the model's context length. None takes 2048, or less if
            the model's is shorter.
        stride: tokens between window starts, at most `context`. None takes half of it.
        progress: show a bar on standard error, if that is a terminal.

    Raises:
        UserError: the folder cannot be loaded, the text is too short, or `context` or `stride` is out of range.
    """
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(TEXT if text is None else text)
    if len(ids) < 2:
        raise UserError(f"the text has {len(ids)} tokens, perplexity needs two; give a longer one")
    model = load_model(folder)
    first = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    longest = model.args.max_seq_len - len(first)
    context = min(_CONTEXT, longest) if context is None else context
    stride = max(1, context // 2) if stride is None else stride
    if not 2 <= context <= longest:
        raise UserError(f"--context {context}: from 2 to {longest} tokens are possible with this model")
    if not 1 <= stride <= context:
        raise UserError(f"--stride {stride}: from 1 to the context, {context}, are possible")
    return score(model, ids, first=first, context=context, stride=stride, progress=progress)


def score(
    model: Transformer,
    ids: Sequence[int],
    *,
    first: Sequence[int] = (),
    context: int,
    stride: int,
    progress: bool = False,
) -> Perplexity:
    """Score `ids` with a loaded model; `first` precedes every window. The other arguments are those of `perplexity`."""
    losses: list[mx.array] = []
    windows = list(_windows(len(ids), context, stride))
    for begin, end, scored in tqdm(windows, desc="perplexity", unit="window", disable=None if progress else True):
        losses.append(_losses(model, [*first, *ids[begin:end]])[-(end - scored) :])
    # In float64, because a float32 sum over a long text loses digits.
    values = np.asarray(mx.concatenate(losses), np.float64)
    return Perplexity(values.size, len(windows), float(values.mean()), float(values.std()) / math.sqrt(values.size))


def _windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Begin and end of each window, and the begin of its scored tokens, as positions in the text."""
    scored = 0
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        yield begin, end, scored
        scored = end
        if end == length:
            return


def _losses(model: Transformer, ids: Sequence[int]) -> mx.array:
    """Negative log-likelihood of every token after the first, (len(ids) - 1,); computed in chunks over one KV cache."""
    cache, losses = model.make_cache(), [mx.zeros((0,))]
    for start in range(0, len(ids) - 1, _CHUNK):
        inputs, targets = ids[start : start + _CHUNK], mx.array(ids[start + 1 : start + _CHUNK + 1])
        inputs = inputs[: targets.size]
        logits = model(mx.array([inputs]), start_pos=start, cache=cache)[0].astype(mx.float32)
        chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        losses.append(mx.logsumexp(logits, axis=-1) - chosen)
        mx.eval(losses[-1])
    return mx.concatenate(losses)
