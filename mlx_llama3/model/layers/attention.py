"""Attention on MLX's CPU backend, shared out to the cores.

There `mx.fast.scaled_dot_product_attention` is composed of operations that one thread does, the scores of all keys are
in memory, masked or not, and their exponentials are most of a long prompt's time. Powers of two are sooner done, and as
exact.
"""

import math

from mlx_llama3.model.layers.tiled_linear import LOG2_E, cpu_streams, split_ranges

import mlx.core as mx

# Positions of context from which several threads are sooner done with a decoded token than one, and scores from which
# powers of two are sooner done than `mx.softmax`, which is one operation instead of five.
_SHARED, _MANY_SCORES = 512, 1 << 14
# Queries of a prompt that go together: what they do not see is not computed. And the least that are worth sharing out.
_ROWS, _FEW_ROWS = 64, 16
# Bytes of scores that a pass may have: they are allocated for a whole layer at a time, whatever its blocks.
_SCORES = 1 << 27
_LEAST_CHUNK = 32


def scaled_dot_product_attention(
    q: mx.array, keys: mx.array, values: mx.array, scale: float, mask: str | mx.array | None
) -> mx.array:
    """`mx.fast.scaled_dot_product_attention`; on the CPU in float32 by shorter ways.

    Args:
        q: `(B, n_heads, S, head_dim)`; keys, values: `(B, n_kv_heads, T, head_dim)`.
        mask: None, "causal" (the last query stands at the last key), or an array.

    Returns:
        `(B, n_heads, S, head_dim)`.
    """
    on_cpu = q.dtype == mx.float32 and mx.default_device() == mx.cpu
    if on_cpu and mask is None and q.shape[2] == 1:
        return _of_one(q, keys, values, scale)
    if on_cpu and isinstance(mask, str) and q.shape[2] >= _FEW_ROWS:
        return _of_many(q, keys, values, scale)
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)


def fitting_chunk(chunk: int, context: int, n_heads: int) -> int:
    """Positions of a prompt, at most `chunk`, whose scores of `context` keys fit into memory. All of them on a GPU,
    where scores are never stored."""
    if mx.default_device() != mx.cpu:
        return chunk
    return min(chunk, max(_LEAST_CHUNK, _SCORES // (4 * n_heads * max(1, context))))


def _of_many(q: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal attention by blocks of queries, which the streams take in turns; each sees the keys before its end."""
    B, n_kv_heads, T, head_dim = keys.shape
    S = q.shape[2]
    grouped = (q * (scale * LOG2_E)).reshape(B, n_kv_heads, -1, S, head_dim)
    parts = []
    for number, start in enumerate(range(0, S, _ROWS)):
        end = min(S, start + _ROWS)
        seen = T - S + end
        with mx.stream(cpu_streams()[number % len(cpu_streams())]):
            parts.append(_block(grouped[..., start:end, :], keys[:, :, :seen], values[:, :, :seen]))
    return mx.concatenate(parts, axis=3).reshape(q.shape)


def _block(q: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """`(B, heads, group, S, head_dim)` of q, scaled so that its scores are octaves; the last query stands at the last
    key. All on the current stream."""
    B, heads, group, S, head_dim = q.shape
    T = keys.shape[2]
    rows = q.reshape(B, heads, group * S, head_dim)  # the heads that share keys are rows of one product
    scores = (rows @ keys.swapaxes(-1, -2)).reshape(B, heads, group, S, T)
    scores = scores + mx.triu(mx.full((S, T), -math.inf), k=T - S + 1)
    return _mean(scores.reshape(B, heads, group * S, T), values).reshape(q.shape)


def _of_one(q: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Attention of one position to all keys, its heads shared out to the streams."""
    B, n_kv_heads, T, head_dim = keys.shape
    octaves = q.shape[1] * T >= _MANY_SCORES
    scaled = q * (scale * LOG2_E if octaves else scale)
    grouped = scaled.reshape(B, n_kv_heads, -1, head_dim)  # the heads that share keys are rows of one product
    if T < _SHARED:
        return _heads(grouped, keys, values, octaves).reshape(q.shape)
    parts = []
    for (a, b), stream in zip(split_ranges(n_kv_heads), cpu_streams(), strict=False):
        with mx.stream(stream):
            parts.append(_heads(grouped[:, a:b], keys[:, a:b], values[:, a:b], octaves))
    return mx.concatenate(parts, axis=1).reshape(q.shape)


def _heads(q: mx.array, keys: mx.array, values: mx.array, octaves: bool) -> mx.array:
    """`(B, heads, group, head_dim)` of q, scaled so that its scores are octaves, or not; all on the current stream."""
    scores = q @ keys.swapaxes(-1, -2)  # (B, heads, group, T)
    return _mean(scores, values) if octaves else mx.softmax(scores, axis=-1) @ values


def _mean(octaves: mx.array, values: mx.array) -> mx.array:
    """Of `(..., T, head_dim)`, weighed by two to the power of `(..., rows, T)`: `(..., rows, head_dim)`."""
    weights = mx.power(2.0, octaves - mx.max(octaves, axis=-1, keepdims=True))
    return weights @ values / mx.sum(weights, axis=-1, keepdims=True)
