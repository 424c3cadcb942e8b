"""`look`: run one position of a sequence again, from the cache of the positions before it, and capture its states."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_llama3.errors import UserError
from mlx_llama3.generation.decoding import prefill
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.hooks.taps import NAMES, tapped
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx


@dataclass(frozen=True)
class Position:
    """The states of one position's forward pass.

    states: by TransformerLens's names: resid_pre, z (the heads' outputs, before `wo`), attn_out, resid_mid, mlp_out,
    resid_post; `(n_layers, dim)`, z `(n_layers, n_heads * head_dim)`. cache: up to and including this position.
    """

    model: Transformer
    index: int
    states: dict[str, mx.array]
    cache: list[KVCache]

    @property
    def logits(self) -> mx.array:
        """Logits of the next token, `(vocab,)`."""
        return self.model.head(self.states["resid_post"][-1])


def look(model: Transformer, ids: Sequence[int], index: int, *, cache: list[KVCache] | None = None) -> Position:
    """Run position `index` of `ids` again and capture its states.

    Args:
        ids: the sequence; ids after `index` are not used.
        index: from 0; negative counts from the end.
        cache: one that contains at least the positions before `index` of the same ids, such as a conversation's. It
            is not changed, and with it this costs one decoding step. Otherwise the positions before are run first.

    Raises:
        UserError: there is no such position; the cache has a window and has dropped positions.
    """
    if not -len(ids) <= index < len(ids):
        raise UserError(f"position {index} is not in a sequence of {len(ids)} tokens")
    index %= len(ids)
    if cache is not None and not all(entry.holds_all for entry in cache):
        raise UserError(f"position {index} cannot be looked at: the cache holds a window only; do without max_kv_size")
    if cache is not None and cache[0].offset >= index:
        before = [entry.prefix(index) for entry in cache]
    else:
        before = model.make_cache()
        if index:
            mx.eval(prefill(model, ids[:index], before))
    states: dict[str, list[mx.array]] = {name: [] for name in NAMES}

    def store(_layer: int, name: str, value: mx.array) -> mx.array:
        states[name].append(value[0, 0])
        return value

    tapped(model, store).residual(mx.array([[ids[index]]]), index, before)
    return Position(model, index, {name: mx.stack(rows) for name, rows in states.items()}, before)
