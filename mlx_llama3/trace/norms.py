"""Live norms: the L2 norm of the residual stream and of every update, taken inside the running pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_llama3.model import Transformer
from mlx_llama3.trace.taps import tapped

# The rows of a norms array. The stream before a block is the stream after the one before it, so the five of them cost
# three norms a layer and one more for the embedding.
POINTS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
_MEASURED = ("attn_out", "resid_mid", "mlp_out", "resid_post")


@dataclass(frozen=True)
class PendingNorms:
    """Norms of one pass, not yet evaluated: the embedding's `(S,)` and, a layer, four of `(S,)`, all squared."""

    embedding: mx.array
    layers: list[list[mx.array]]

    def arrays(self) -> list[mx.array]:
        """To be evaluated together with the token of the same pass."""
        return [self.embedding, *(norm for layer in self.layers for norm in layer)]

    def read(self) -> np.ndarray:
        """Float32 `(5, n_layers, S)` in the order of `POINTS`; waits for the values.

        They are gathered on the host: on the GPU a stack would be one copy for each of the inputs.
        """
        measured = np.array([[np.array(norm) for norm in layer] for layer in self.layers])  # (L, 4, S)
        pre = np.concatenate([np.array(self.embedding)[None], measured[:-1, -1]])  # (L, S)
        return np.sqrt(np.stack([pre, *measured.transpose(1, 0, 2)]))


class NormCapture:
    """A twin of a model that takes norms as it runs; use `model` in its place, and `take` after each pass."""

    def __init__(self, model: Transformer) -> None:
        self._passes: list[PendingNorms] = []
        self.model = tapped(model, self._seen, names=_MEASURED)
        self.model.tok_embeddings = _EmbeddingTap(model.tok_embeddings, self._begin)

    def take(self) -> list[PendingNorms]:
        """The norms of the passes of `model` since the last call, for the first sequence of the batch."""
        passes, self._passes = self._passes, []
        return passes

    def arrays(self) -> list[mx.array]:
        """What the passes since the last `take` have measured, to be evaluated with them."""
        return [array for pending in self._passes for array in pending.arrays()]

    @staticmethod
    def read(passes: list[PendingNorms]) -> np.ndarray:
        """Float32 `(5, n_layers, positions)` of all positions of these passes; waits for the values."""
        return np.concatenate([pending.read() for pending in passes], axis=-1)

    def _begin(self, x: mx.array) -> None:
        self._passes.append(PendingNorms(squared_norm(x), []))

    def _seen(self, layer: int, name: str, value: mx.array) -> mx.array:
        layers = self._passes[-1].layers
        if name == _MEASURED[0]:
            layers.append([])
        layers[-1].append(squared_norm(value))
        return value


class _EmbeddingTap:
    """Shows the first stream; everything else of the embedding (a tied head) goes through."""

    def __init__(self, module: Any, seen: Callable[[mx.array], None]) -> None:
        self.module, self._seen = module, seen

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.module(tokens)
        self._seen(x)
        return x

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def squared_norm(x: mx.array) -> mx.array:
    """`(B, S, dim)` -> float32 `(S,)`: the squared L2 norm of each position of the first sequence.

    A decoded position is one dot product, one operation instead of a square and a sum.
    """
    x = x[0].astype(mx.float32)
    return (x @ x.T)[0] if x.shape[0] == 1 else (x * x).sum(-1)
