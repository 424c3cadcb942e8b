"""Find where a NaN first appears: a slow second forward pass that checks every step of every block."""

from collections.abc import Sequence

from mlx_llama3.errors import UserError
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx


def nan_error(model: Transformer, ids: Sequence[int]) -> UserError:
    """The error for a model that gives NaN after `ids`; it names the module in which the first one appears."""
    return UserError(
        f"the model gives NaN, first in {first_nan(model, ids)}: its weights are damaged, or overflow their type; "
        "convert it again, or with --dtype bfloat16 or float32"
    )


def first_nan(model: Transformer, ids: Sequence[int]) -> str:
    """The name (Meta's) of the first module whose output for `ids`, from position 0, contains NaN or infinity."""
    if not model.is_whole:
        return "an unknown layer (a run on one machine names it)"
    tokens = mx.array([list(ids)])
    freqs = model.rope.frequencies(0, len(ids))
    mask = "causal" if len(ids) > 1 else None

    def broken(x: mx.array) -> bool:
        return not mx.isfinite(x).all().item()

    x = model.tok_embeddings(tokens)
    if broken(x):
        return "tok_embeddings"
    for i, block in enumerate(model.layers):
        # As in `TransformerBlock`, but checking each update.
        update = block.attention(block.attention_norm(x), 0, freqs, mask)
        if broken(h := x + update):
            return f"layers.{i}.attention"
        if broken(x := h + block.feed_forward(block.ffn_norm(h))):
            return f"layers.{i}.feed_forward"
    return "output"
