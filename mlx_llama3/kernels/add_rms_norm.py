"""The add of one branch and the norm before the next."""

import mlx.core as mx


def reference(x: mx.array, update: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array, mx.array]:
    """Stream `x` and `update` `(B, S, dim)`, gains `weight` `(dim,)` -> the new stream, its norm, and squared L2 norms.

    Returns:
        `x + update` and `rms_norm(x + update) * weight`, `(B, S, dim)` in the dtype of x; the squared norms of the new
        stream and of the update, float32 `(2, B, S)`.
    """
    h = x + update
    squares = mx.stack([mx.square(each.astype(mx.float32)).sum(-1) for each in (h, update)])
    return h, mx.fast.rms_norm(h, weight, eps), squares
