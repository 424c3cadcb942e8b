"""Where a NaN comes from: a slow second pass that looks at every step of every block."""

from collections.abc import Sequence

from mlx_llama3.model.transformer import Transformer

import mlx.core as mx


def first_nan(model: Transformer, ids: Sequence[int]) -> str:
    """The first module, by its official name, whose output for `ids` (from position 0) holds NaN or infinity."""
    if not model.is_whole:
        return "a layer that a run on one machine would name"
    tokens = mx.array([list(ids)])
    freqs = model.rope.frequencies(0, len(ids))
    mask = "causal" if len(ids) > 1 else None

    def broken(x: mx.array) -> bool:
        return not mx.isfinite(x).all().item()

    x = model.tok_embeddings(tokens)
    if broken(x):
        return "tok_embeddings"
    for i, block in enumerate(model.layers):
        # The block's two lines, each update looked at on its way.
        update = block.attention(block.attention_norm(x), 0, freqs, mask)
        if broken(h := x + update):
            return f"layers.{i}.attention"
        if broken(x := h + block.feed_forward(block.ffn_norm(h))):
            return f"layers.{i}.feed_forward"
    return "output"
