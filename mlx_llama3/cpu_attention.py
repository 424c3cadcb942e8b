"""Attention of a decoded position on MLX's CPU backend, with its heads shared out to the cores."""

import mlx.core as mx

from mlx_llama3.cpu import bounds, streams

# Positions from which several threads are sooner done than one.
_SHARED = 512


def attend(q: mx.array, keys: mx.array, values: mx.array, scale: float, mask: str | mx.array | None) -> mx.array:
    """`mx.fast.scaled_dot_product_attention`; on the CPU, one position without a mask goes the shorter way.

    Args:
        q: `(B, n_heads, S, head_dim)`; keys, values: `(B, n_kv_heads, T, head_dim)`.

    Returns:
        `(B, n_heads, S, head_dim)`.
    """
    if mask is not None or q.shape[2] > 1 or q.dtype != mx.float32 or mx.default_device() != mx.cpu:
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)
    B, n_kv_heads, T, head_dim = keys.shape
    grouped = (q * scale).reshape(B, n_kv_heads, -1, head_dim)  # the heads that share keys are rows of one product
    if T < _SHARED:
        out = _heads(grouped, keys, values, streams()[0])
    else:
        cuts = bounds(n_kv_heads)
        parts = [
            _heads(grouped[:, a:b], keys[:, a:b], values[:, a:b], stream)
            for a, b, stream in zip(cuts, cuts[1:], streams(), strict=False)
        ]
        out = mx.concatenate(parts, axis=1)
    return out.reshape(q.shape)


def _heads(q: mx.array, keys: mx.array, values: mx.array, stream: mx.Stream) -> mx.array:
    """`(B, heads, group, head_dim)`, all on one stream."""
    scores = mx.matmul(q, mx.swapaxes(keys, -1, -2, stream=stream), stream=stream)  # (B, heads, group, T)
    return mx.matmul(mx.softmax(scores, axis=-1, stream=stream), values, stream=stream)
