"""Direct logit attribution: how much each component of the residual stream adds to one token's logit.

The final residual stream is the sum of the embedding, every attention and every MLP. With the scale of the final norm
frozen the head is linear, so the logit is the sum of the components' contributions (Elhage et al. 2021, "A mathematical
framework for transformer circuits").
"""

from dataclasses import dataclass

import numpy as np

from mlx_llama3.model.layers.packed_linear import row
from mlx_llama3.trace.position import Position

import mlx.core as mx


@dataclass(frozen=True)
class Attribution:
    """Contributions to a logit. embedding: float; attention, mlp: `(n_layers,)`; heads: `(n_layers, n_heads)`.

    Up to rounding, `embedding + attention.sum() + mlp.sum() == logit`, and the heads of a layer sum to its attention.
    """

    logit: float
    embedding: float
    attention: np.ndarray
    mlp: np.ndarray
    heads: np.ndarray


def attribute(position: Position, token: int) -> Attribution:
    """What each component at `position` adds to the logit of `token`."""
    direction = _direction(position, token)  # (dim,)
    states, model = position.states, position.model
    heads = []
    for layer, z in enumerate(states["z"]):
        attention = model.layers[layer].attention
        # One row per head, with all other heads zero: this works for any kind of `wo`, dense or quantized.
        separate = mx.eye(attention.n_heads, dtype=z.dtype)[:, :, None] * z.reshape(attention.n_heads, -1)
        heads.append(attention.wo(separate.reshape(attention.n_heads, -1)) @ direction)
    branches = {name: states[name].astype(mx.float32) @ direction for name in ("attn_out", "mlp_out")}
    embedding = (states["resid_pre"][0].astype(mx.float32) * direction).sum()
    return Attribution(
        logit=position.logits[token].item(),
        embedding=embedding.item(),
        attention=np.asarray(branches["attn_out"]),
        mlp=np.asarray(branches["mlp_out"]),
        heads=np.asarray(mx.stack(heads)),
    )


def promoted(position: Position, layer: int, branch: str, *, k: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that a branch's update alone promotes or suppresses most, with the final norm's scale frozen.

    branch: "attn_out" or "mlp_out". Returns (ids, logits) `(2k,)`: the k most promoted, then the k most suppressed.
    """
    x, scale = position.states[branch][layer].astype(mx.float32), _frozen_scale(position)
    model = position.model
    normed = (x * scale * model.norm.weight.astype(mx.float32)).astype(position.states[branch].dtype)
    logits = model.unembed(normed)
    order = mx.argsort(-logits)
    chosen = mx.concatenate([order[:k], order[::-1][:k]])
    return np.asarray(chosen), np.asarray(logits[chosen].astype(mx.float32))


def _frozen_scale(position: Position) -> mx.array:
    """The final norm's scale at this position: 1 / rms, float32."""
    final = position.states["resid_post"][-1].astype(mx.float32)
    return mx.rsqrt((final * final).mean() + position.model.norm.eps)


def _direction(position: Position, token: int) -> mx.array:
    """The token's direction, float32 `(dim,)`: its dot product with a component is that component's contribution.

    It is the head's row (the token's embedding if tied), times the final norm's weight and frozen scale.
    """
    model = position.model
    head = model.tok_embeddings if model.args.tie_word_embeddings else model.output
    return row(head, token).astype(mx.float32) * model.norm.weight.astype(mx.float32) * _frozen_scale(position)
