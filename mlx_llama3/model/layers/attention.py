"""Attention, with a faster implementation for MLX's CPU backend that uses all cores.

On the CPU, `mx.fast.scaled_dot_product_attention` is a sequence of operations that run on one thread. It stores the
scores of all keys, masked or not, and their exponentials take most of a long prompt's time. A power of two is faster
than `mx.exp` and as exact, so the scores here are scaled by log2(e) and the softmax has base 2.
"""

import math

from mlx_llama3.model.layers.tiled_linear import LOG2_E, cpu_streams, split_ranges

import mlx.core as mx

# Context length from which several threads decode a token faster than one.
_THREADED_CONTEXT = 512
# Number of scores from which a base-2 softmax of five operations is faster than the single operation `mx.softmax`.
_EXP2_SCORES = 1 << 14
# Queries of a prompt in one block; keys after a block are skipped. And the fewest queries that are worth splitting.
_QUERY_BLOCK, _MIN_QUERIES = 64, 16
# Most bytes of scores in a pass: they are allocated for a whole layer at a time, however it is split into blocks.
_MAX_SCORE_BYTES = 1 << 27
_MIN_CHUNK = 32


def scaled_dot_product_attention(
    q: mx.array, keys: mx.array, values: mx.array, scale: float, mask: str | mx.array | None
) -> mx.array:
    """Softmax attention, as `mx.fast.scaled_dot_product_attention`; faster for float32 on the CPU.

    Args:
        q: queries `(B, n_heads, S, head_dim)`.
        keys, values: `(B, n_kv_heads, T, head_dim)` each.
        scale: factor of the scores, `head_dim ** -0.5`.
        mask: None, "causal" (the last query is at the position of the last key), or an array.

    Returns:
        `(B, n_heads, S, head_dim)`.
    """
    on_cpu = q.dtype == mx.float32 and mx.default_device() == mx.cpu
    if on_cpu and mask is None and q.shape[2] == 1:
        return _one_query(q, keys, values, scale)
    if on_cpu and isinstance(mask, str) and q.shape[2] >= _MIN_QUERIES:
        return _causal(q, keys, values, scale)
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)


def fitting_chunk(chunk: int, context: int, n_heads: int) -> int:
    """How many positions of a prompt, at most `chunk`, to run in one pass over a context of `context` keys.

    On the CPU, a chunk's scores must stay below 128 MiB, but a chunk has at least 32 positions. On a GPU this is
    `chunk`: scores are never stored there.
    """
    if mx.default_device() != mx.cpu:
        return chunk
    return min(chunk, max(_MIN_CHUNK, _MAX_SCORE_BYTES // (4 * n_heads * max(1, context))))


def _causal(q: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal attention in blocks of queries, spread over the CPU streams; a block reads no keys after its end."""
    B, n_kv_heads, T, head_dim = keys.shape
    S = q.shape[2]
    grouped = (q * (scale * LOG2_E)).reshape(B, n_kv_heads, -1, S, head_dim)
    parts = []
    for number, start in enumerate(range(0, S, _QUERY_BLOCK)):
        end = min(S, start + _QUERY_BLOCK)
        n_keys = T - S + end
        with mx.stream(cpu_streams()[number % len(cpu_streams())]):
            parts.append(_causal_block(grouped[..., start:end, :], keys[:, :, :n_keys], values[:, :, :n_keys]))
    return mx.concatenate(parts, axis=3).reshape(q.shape)


def _causal_block(q: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Causal attention of queries `(B, n_kv_heads, group, S, head_dim)`, on the current stream.

    The queries are scaled for base 2. The last query is at the position of the last key. Returns the shape of q.
    """
    B, heads, group, S, head_dim = q.shape
    T = keys.shape[2]
    rows = q.reshape(B, heads, group * S, head_dim)  # heads that share keys: rows of one product
    scores = (rows @ keys.swapaxes(-1, -2)).reshape(B, heads, group, S, T)
    scores = scores + mx.triu(mx.full((S, T), -math.inf), k=T - S + 1)
    return _weighted_values(scores.reshape(B, heads, group * S, T), values).reshape(q.shape)


def _one_query(q: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Attention of one position to all keys; in a long context its heads are split over the CPU streams."""
    B, n_kv_heads, T, head_dim = keys.shape
    base2 = q.shape[1] * T >= _EXP2_SCORES
    scaled = q * (scale * LOG2_E if base2 else scale)
    grouped = scaled.reshape(B, n_kv_heads, -1, head_dim)  # heads that share keys: rows of one product
    if T < _THREADED_CONTEXT:
        return _heads(grouped, keys, values, base2).reshape(q.shape)
    parts = []
    for (a, b), stream in zip(split_ranges(n_kv_heads), cpu_streams(), strict=False):
        with mx.stream(stream):
            parts.append(_heads(grouped[:, a:b], keys[:, a:b], values[:, a:b], base2))
    return mx.concatenate(parts, axis=1).reshape(q.shape)


def _heads(q: mx.array, keys: mx.array, values: mx.array, base2: bool) -> mx.array:
    """Attention of one position's scaled queries `(B, heads, group, head_dim)`, on the current stream."""
    scores = q @ keys.swapaxes(-1, -2)  # (B, heads, group, T)
    return _weighted_values(scores, values) if base2 else mx.softmax(scores, axis=-1) @ values


def _weighted_values(scores: mx.array, values: mx.array) -> mx.array:
    """Base-2 softmax of scores `(..., rows, T)`, times values `(..., T, head_dim)`: `(..., rows, head_dim)`."""
    weights = mx.power(2.0, scores - mx.max(scores, axis=-1, keepdims=True))
    return weights @ values / mx.sum(weights, axis=-1, keepdims=True)
