"""What if: the next-token distribution of the plain model beside that of an edited one, at one position."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.options.edits import scale_edit
from app.ui.session.session import Session
from mlx_llama3.errors import UserError
from mlx_llama3.generation.decoding import prefill
from mlx_llama3.generation.sampling import log_softmax
from mlx_llama3.model.hooks.edits import Scale, edited
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx

SHOWN = 8


@dataclass(frozen=True)
class Change:
    """What edits do to the next token after `position`.

    kl: Kullback-Leibler divergence of the edited from the plain distribution, nats. moved: the probability that goes to
    other tokens, 0 to 1 (total variation). tokens: id, text, probability before and after, of the best of both. came:
    the id that really came next, None at the end of the trace.
    """

    position: int
    kl: float
    moved: float
    tokens: list[tuple[int, str, float, float]]
    came: int | None


def read_edits(texts: Sequence[str]) -> list[Scale]:
    """`3:mlp=0`, `5:head:2=0.5`, ... Raises `UserError` for one that is none."""
    try:
        return [scale_edit(text.strip()) for text in texts]
    except argparse.ArgumentTypeError as error:
        raise UserError(str(error)) from None


def compare(session: Session, position: int, edits: Sequence[Scale]) -> Change:
    """Run the tokens up to `position` with and without `edits`; on the engine's thread.

    An edit changes every state after it, so the cache of the conversation is of no use: this costs two prompts.
    """
    tokens = session.trace.tokens.tolist()
    plain = session.opened.model
    before = _logprobs(plain, tokens[: position + 1])
    after = _logprobs(edited(plain, edits), tokens[: position + 1])
    p, q = np.exp(before), np.exp(after)
    best = dict.fromkeys([*np.argsort(-p)[:SHOWN].tolist(), *np.argsort(-q)[:SHOWN].tolist()])
    came = tokens[position + 1] if position + 1 < len(tokens) else None
    if came is not None:
        best[came] = None
    rows = [(token, session.piece(token), float(p[token]), float(q[token])) for token in best]
    return Change(
        position,
        kl=float((p * (before - after)).sum()),
        moved=float(np.abs(p - q).sum() / 2),
        tokens=sorted(rows, key=lambda row: -max(row[2:])),
        came=came,
    )


def _logprobs(model: Transformer, tokens: list[int]) -> np.ndarray:
    logits = prefill(model, tokens, model.make_cache())
    return np.array(log_softmax(logits)[0].astype(mx.float32), dtype=np.float64)
