"""Direct logit attribution: how much each component of the residual stream adds to one token's logit.

The final stream is a sum (embedding, every attention, every MLP), and with the final norm's scale frozen at its value
the head is linear, so the logit is the sum of what each component gives (Elhage et al. 2021, "A mathematical framework
for transformer circuits").
"""

from dataclasses import dataclass

import numpy as np

from mlx_llama3.model.layers.packed_linear import row
from mlx_llama3.trace.position import Position

import mlx.core as mx


@dataclass(frozen=True)
class Attribution:
    """Shares of a logit. embedding: float; attention, mlp: `(n_layers,)`; heads: `(n_layers, n_heads)`.

    `embedding + attention.sum() + mlp.sum() == logit`, and the heads of a layer sum to its attention, to rounding.
    """

    logit: float
    embedding: float
    attention: np.ndarray
    mlp: np.ndarray
    heads: np.ndarray


def attribute(position: Position, token: int) -> Attribution:
    """What each component at `position` adds to the logit of `token` as the next one."""
    direction = _direction(position, token)  # (dim,)
    states, model = position.states, position.model
    heads = []
    for layer, z in enumerate(states["z"]):
        attention = model.layers[layer].attention
        # One row a head, all other heads zero, so that any kind of matrix (packed, quantized) can be asked.
        alone = mx.eye(attention.n_heads, dtype=z.dtype)[:, :, None] * z.reshape(attention.n_heads, -1)
        heads.append(attention.wo(alone.reshape(attention.n_heads, -1)) @ direction)
    shares = {name: states[name].astype(mx.float32) @ direction for name in ("attn_out", "mlp_out")}
    embedding = (states["resid_pre"][0].astype(mx.float32) * direction).sum()
    return Attribution(
        logit=position.logits[token].item(),
        embedding=embedding.item(),
        attention=np.asarray(shares["attn_out"]),
        mlp=np.asarray(shares["mlp_out"]),
        heads=np.asarray(mx.stack(heads)),
    )


def promoted(position: Position, layer: int, branch: str, *, k: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """What a branch's update alone does to the logits: (ids, values) `(2k,)`, the k most promoted, then suppressed.

    `branch` is "attn_out" or "mlp_out".
    """
    x, scale = position.states[branch][layer].astype(mx.float32), _frozen_scale(position)
    model = position.model
    normed = (x * scale * model.norm.weight.astype(mx.float32)).astype(position.states[branch].dtype)
    logits = model.unembed(normed)
    order = mx.argsort(-logits)
    chosen = mx.concatenate([order[:k], order[::-1][:k]])
    return np.asarray(chosen), np.asarray(logits[chosen].astype(mx.float32))


def _frozen_scale(position: Position) -> mx.array:
    """The factor that the final norm multiplied the stream by: 1 / rms, float32."""
    final = position.states["resid_post"][-1].astype(mx.float32)
    return mx.rsqrt((final * final).mean() + position.model.norm.eps)


def _direction(position: Position, token: int) -> mx.array:
    """The vector whose product with a component of the stream is what it adds to the token's logit, float32 `(dim,)`.

    The head's row (the token's embedding when tied), scaled by the norm's gain and frozen scale.
    """
    model = position.model
    head = model.tok_embeddings if model.args.tie_word_embeddings else model.output
    return row(head, token).astype(mx.float32) * model.norm.weight.astype(mx.float32) * _frozen_scale(position)
