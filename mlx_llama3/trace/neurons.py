"""The neurons of a SwiGLU layer at one position: how many are active, and which most."""

from dataclasses import dataclass

import numpy as np

from mlx_llama3.trace.position import Position

import mlx.core as mx


@dataclass(frozen=True)
class Neurons:
    """The `hidden_dim` products `silu(w1 x) * (w3 x)` of one layer at one position, before `w2`.

    active: fraction of neurons with a positive gate (`w1 x > 0`), 0 to 1. ids, values: `(k,)`, the neurons of largest
    magnitude, largest first, and their signed values. values_all: `(hidden_dim,)` float32.
    """

    active: float
    ids: np.ndarray
    values: np.ndarray
    values_all: np.ndarray


def neurons(position: Position, layer: int, *, k: int = 10) -> Neurons:
    """The neurons of `layer` at `position`."""
    position.model.need_whole()
    block = position.model.layers[layer]
    gate, up = block.feed_forward.w13(block.ffn_norm(position.states["resid_mid"][layer]))  # (hidden_dim,) each
    values = np.asarray((gate * mx.sigmoid(gate) * up).astype(mx.float32))
    order = np.argsort(-np.abs(values))[:k]
    return Neurons(float((gate > 0).astype(mx.float32).mean().item()), order, values[order], values)
