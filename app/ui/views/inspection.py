"""Everything that the lens view shows of one cell, computed on the model's thread and handed over as NumPy."""

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
    """One cell, looked into. `texts` holds the text of every token that is named.

    target: the next token that everything is asked about; chosen: the one that really came next, None at the end of the
    trace. candidates: the model's own best, (id, probability), best first. attention: `(n_heads, T)` of the layer.
    promoted: of each of `BRANCHES` of the layer (ids, what they add to the logit), the promoted ones, then the
    suppressed ones.
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
    """Look into a cell; on the engine's thread. `target`: another next token to ask about than the one that came."""
    session, layer, index = cell.session, cell.layer, cell.position
    position = session.look(index)
    ids, logprobs = top_logprobs(log_softmax(position.logits[None]), CANDIDATES)
    candidates = list(zip(ids[0].tolist(), np.exp(np.array(logprobs[0])).tolist(), strict=True))
    tokens = session.trace.tokens
    chosen = int(tokens[index + 1]) if index + 1 < len(tokens) else None
    if target is None:
        target = candidates[0][0] if chosen is None else chosen
    lens = logit_lens(position, target, k=LENS_TOKENS)
    moved = {branch: promoted(position, layer, branch, k=PROMOTED) for branch in BRANCHES}
    named = {target, *(token for token, _ in candidates), *lens.ids.ravel().tolist()}
    named |= {token for ids, _ in moved.values() for token in ids.tolist()}
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
        promoted=moved,
        texts={token: session.piece(token) for token in named},
        pieces=session.trace.pieces[: index + 1],
    )
