"""Compares the next-token distributions of the plain and an edited model at one position."""

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

BEST = 8


@dataclass(frozen=True)
class Change:
    """The effect of edits on the next token after `position`.

    kl: the Kullback-Leibler divergence KL(plain || edited), in nats. moved: the total variation distance, 0 to 1.
    tokens: (id, text, probability before, after) of the best tokens of both. chosen: the id of the actual next token,
    None at the end of the trace.
    """

    position: int
    kl: float
    moved: float
    tokens: list[tuple[int, str, float, float]]
    chosen: int | None


def read_edits(texts: Sequence[str]) -> list[Scale]:
    """Parse `3:mlp=0`, `5:head:2=0.5`, ... Raises `UserError` for a malformed edit."""
    try:
        return [scale_edit(text.strip()) for text in texts]
    except argparse.ArgumentTypeError as error:
        raise UserError(str(error)) from None


def compare(session: Session, position: int, edits: Sequence[Scale]) -> Change:
    """Run the tokens up to `position` with and without `edits`; on the engine's thread.

    An edit changes all later states, so the conversation's cache cannot be reused: this costs two prefills.
    """
    tokens = session.trace.tokens.tolist()
    plain = session.opened.model
    before = _logprobs(plain, tokens[: position + 1])
    after = _logprobs(edited(plain, edits), tokens[: position + 1])
    p, q = np.exp(before), np.exp(after)
    best = dict.fromkeys([*np.argsort(-p)[:BEST].tolist(), *np.argsort(-q)[:BEST].tolist()])
    chosen = tokens[position + 1] if position + 1 < len(tokens) else None
    if chosen is not None:
        best[chosen] = None
    rows = [(token, session.piece(token), float(p[token]), float(q[token])) for token in best]
    return Change(
        position,
        kl=float((p * (before - after)).sum()),
        moved=float(np.abs(p - q).sum() / 2),
        tokens=sorted(rows, key=lambda row: -max(row[2:])),
        chosen=chosen,
    )


def _logprobs(model: Transformer, tokens: list[int]) -> np.ndarray:
    logits = prefill(model, tokens, model.make_cache())
    return np.array(log_softmax(logits)[0].astype(mx.float32), dtype=np.float64)
