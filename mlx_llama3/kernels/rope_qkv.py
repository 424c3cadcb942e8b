"""From the packed projection to queries, and to keys and values as the cache holds them."""

import mlx.core as mx

from mlx_llama3.rope import Freqs, rotate


def reference(qkv: mx.array, n_heads: int, n_kv_heads: int, start_pos: int, freqs: Freqs) -> tuple[mx.array, mx.array]:
    """`(B, S, (n_heads + 2 n_kv_heads) * head_dim)`, rows of wq, wk, wv -> rotated q `(B, n_heads, S, head_dim)`, and
    rotated keys and values together, `(2, B, n_kv_heads, S, head_dim)`."""
    B, S, width = qkv.shape
    rotated = n_heads + n_kv_heads
    heads = qkv.reshape(B, S, rotated + n_kv_heads, -1).transpose(0, 2, 1, 3)  # (B, heads, S, head_dim)
    # Queries and keys turn by the same angles: one rotation for both.
    qk = rotate(heads[:, :rotated], start_pos, freqs)
    return qk[:, :n_heads], mx.stack([qk[:, n_heads:], heads[:, rotated:]])
