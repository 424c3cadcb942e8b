"""The first half of the feed-forward: gate and up products and SwiGLU."""

import mlx.core as mx

from mlx_llama3.linear import PackedLinear


def reference(w13: PackedLinear, x: mx.array) -> mx.array:
    """`(..., dim)` -> `silu(w1 x) * (w3 x)`, `(..., hidden_dim)` in the dtype of x (SwiGLU, arXiv 2002.05202)."""
    gate, up = w13(x)
    return gate * mx.sigmoid(gate) * up
