"""Attention patterns. Fused attention returns no weights, so softmax(QK) is computed again for the requested layer."""

import numpy as np

from mlx_llama3.model.transformer import Attention, Transformer
from mlx_llama3.trace.position import Position

import mlx.core as mx


def attention_from(position: Position, layer: int) -> np.ndarray:
    """The attention weights of each head of `layer` at `position`: float32 `(n_heads, T)`, with the cached keys."""
    position.model.need_whole()
    block = position.model.layers[layer]
    x = block.attention_norm(position.states["resid_pre"][layer][None, None])  # (1, 1, dim)
    freqs = position.model.rope.frequencies(position.index, 1)
    queries, _ = block.attention.project(x, position.index, freqs)
    keys, _ = position.cache[layer].fetch()
    return np.asarray(_pattern(block.attention, queries, keys)[0, :, 0])


def attention_pattern(model: Transformer, resid_pre: mx.array, layer: int) -> np.ndarray:
    """The causal attention pattern of a layer, float32 `(n_heads, T, T)`, from its input `resid_pre` `(T, dim)`."""
    model.need_whole()
    block, length = model.layers[layer], resid_pre.shape[0]
    freqs = model.rope.frequencies(0, length)
    queries, kv = block.attention.project(block.attention_norm(resid_pre[None]), 0, freqs)
    return np.asarray(_pattern(block.attention, queries, kv[0])[0])


def _pattern(attention: Attention, queries: mx.array, keys: mx.array) -> mx.array:
    """Causal softmax of scaled products, float32 `(B, n_heads, S, T)`; the queries are the last S positions."""
    B, n_heads, S, head_dim = queries.shape
    T = keys.shape[2]
    grouped = queries.reshape(B, attention.n_kv_heads, -1, S, head_dim)  # grouped by shared key head (GQA)
    scores = (grouped * attention.scale) @ keys[:, :, None].swapaxes(-1, -2)  # (B, n_kv_heads, group, S, T)
    visible = mx.arange(T) <= mx.arange(T - S, T)[:, None]
    scores = mx.where(visible, scores.astype(mx.float32), -mx.inf)
    return mx.softmax(scores, axis=-1).reshape(B, n_heads, S, T)
