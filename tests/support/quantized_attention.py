"""Random inputs for `sdpa_quantized`, and their result in float64."""

import numpy as np

from mlx_llama3.model.kernels.kv_packing import PackedLayout, pack, unpack

import mlx.core as mx


def inputs(
    layout: PackedLayout, lengths: tuple[int, int], *, group: int = 2, S: int = 1, B: int = 1, dtype=mx.float32
) -> tuple[mx.array, mx.array, mx.array]:
    """(queries, dense positions, packed positions) for 2 KV heads, with NaN and garbage beyond the used lengths."""
    keys = mx.random.split(mx.random.key(lengths[1] + group), 3)
    q = mx.random.normal((B, 2 * group, S, layout.head_dim), key=keys[0]).astype(dtype)
    dense = mx.random.normal((2, B, 2, lengths[0], layout.head_dim), key=keys[1]).astype(dtype)
    dense = mx.pad(dense, [(0, 0)] * 3 + [(0, 7), (0, 0)], constant_values=float("nan"))
    packed = pack(mx.random.normal((2, B, 2, max(1, lengths[1]), layout.head_dim), key=keys[2]).astype(dtype), layout)
    packed = mx.pad(packed[:, :, : lengths[1]], [(0, 0), (0, 0), (0, 5), (0, 0)], constant_values=0xFFFFFFFF)
    return q, dense, packed


def attention64(
    q: mx.array, dense: mx.array, packed: mx.array, lengths: tuple[int, int], scale: float, layout: PackedLayout
) -> np.ndarray:
    """Attention in float64 to the packed positions, then the dense ones."""
    unpacked = [array[:, :, : lengths[1]] for array in unpack(packed, layout, mx.float32)]
    group, S = q.shape[1] // 2, q.shape[2]
    keys, values = (
        np.concatenate([np.array(old), np.array(new.astype(mx.float32))], axis=2).repeat(group, axis=1).astype(float)
        for old, new in zip(unpacked, dense[:, :, :, : lengths[0]], strict=True)
    )
    T = sum(lengths)
    scores = scale * np.array(q.astype(mx.float32), float) @ keys.swapaxes(-1, -2)
    scores[..., np.arange(T) > np.arange(T - S, T)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ values / weights.sum(-1, keepdims=True)
