"""Computes what the lens view shows of one cell, as NumPy arrays and Python values."""

from dataclasses import dataclass

import numpy as np

from app.ui.session.selection import Cell
from mlx_llama3.generation.sampling import log_softmax, top_logprobs
from mlx_llama3.trace.attention import attention_from
from mlx_llama3.trace.attribution import Attribution, attribute, promoted
from mlx_llama3.trace.lens import Lens, logit_lens

BRANCHES = ("attn_out", "mlp_out")
LENS_TOKENS = 3
CANDIDATES = 8
PROMOTED = 8


@dataclass(frozen=True)
class Inspection:
    """The inspection of one cell.

    target: the next token whose logit is explained. chosen: the actual next token, None at the end of the trace.
    candidates: the model's most probable next tokens, (id, probability), best first. attention: of the layer,
    `(n_heads, T)`. promoted: for each of `BRANCHES` of the layer (ids, logits added), the most promoted tokens, then
    the most suppressed ones. texts: the text of every token id in here. pieces: the tokens up to the position.
    """

    layer: int
    position: int
    piece: str
    target: int
    chosen: int | None
    candidates: list[tuple[int, float]]
    lens: Lens
    attention: np.ndarray
    attribution: Attribution
    promoted: dict[str, tuple[np.ndarray, np.ndarray]]
    texts: dict[int, str]
    pieces: list[str]


def inspect(cell: Cell, target: int | None = None) -> Inspection:
    """Inspect a cell, on the engine's thread. target: None is the actual next token, or else the most probable."""
    session, layer, index = cell.session, cell.layer, cell.position
    position = session.look(index)
    ids, logprobs = top_logprobs(log_softmax(position.logits[None]), CANDIDATES)
    candidates = list(zip(ids[0].tolist(), np.exp(np.array(logprobs[0])).tolist(), strict=True))
    tokens = session.trace.tokens
    chosen = int(tokens[index + 1]) if index + 1 < len(tokens) else None
    if target is None:
        target = candidates[0][0] if chosen is None else chosen
    lens = logit_lens(position, target, k=LENS_TOKENS)
    promoted_tokens = {branch: promoted(position, layer, branch, k=PROMOTED) for branch in BRANCHES}
    named = {target, *(token for token, _ in candidates), *lens.ids.ravel().tolist()}
    named |= {token for ids, _ in promoted_tokens.values() for token in ids.tolist()}
    return Inspection(
        layer=layer,
        position=index,
        piece=cell.piece,
        target=target,
        chosen=chosen,
        candidates=candidates,
        lens=lens,
        attention=attention_from(position, layer),
        attribution=attribute(position, target),
        promoted=promoted_tokens,
        texts={token: session.piece(token) for token in named},
        pieces=session.trace.pieces[: index + 1],
    )
