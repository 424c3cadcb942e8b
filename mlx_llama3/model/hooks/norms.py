"""Live norms: the L2 norm of the residual stream and of every update, taken inside the running pass."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mlx_llama3.model.transformer import Transformer

import mlx.core as mx

# The rows of a norms array. The stream before a block is the stream after the one before it, so the five of them cost
# four norms a layer and one more for the embedding.
POINTS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
_MEASURED = ("attn_out", "resid_mid", "mlp_out", "resid_post")


@dataclass(frozen=True)
class PendingNorms:
    """Squared norms of one pass, queued and perhaps not computed yet.

    In the order of the pass: the embedding's, then `_MEASURED` of each layer, in arrays of one or more rows `(n, S)`.
    """

    squares: list[mx.array]

    def read(self) -> np.ndarray:
        """Float32 `(5, n_layers, S)` in the order of `POINTS`; waits for the values."""
        return self._norms

    def positions(self) -> list["PendingNorms"]:
        """The same, each position alone, for a pass over a draft that is kept in part."""
        return [_OnePosition(self.squares if index == 0 else [], self, index) for index in range(self._length)]

    @property
    def _length(self) -> int:
        return self.squares[0].shape[1]

    @cached_property
    def _norms(self) -> np.ndarray:
        """Arrays of several positions are gathered here: on the GPU a stack would be one copy for each of them."""
        norms = np.sqrt(np.concatenate([np.asarray(square) for square in self.squares]))  # (1 + 4 L, S)
        # Layer l's five points are five in a row: the stream that leaves it enters the next one.
        first = len(_MEASURED) * np.arange(len(norms) // len(_MEASURED))
        return norms[first + np.arange(len(POINTS))[:, None]]


@dataclass(frozen=True)
class _OnePosition(PendingNorms):
    """Of a whole pass. The first one names its arrays, so that they are queued once."""

    whole: PendingNorms
    index: int

    def read(self) -> np.ndarray:
        return self.whole.read()[..., self.index : self.index + 1]


class NormCapture:
    """A twin of a model that takes norms as it runs; use `model` in its place, and `take` after each pass.

    Of a batch, the first sequence's.
    """

    def __init__(self, model: Transformer) -> None:
        self._passes: list[list[mx.array]] = []
        self.model = copy.copy(model)
        self.model.watch = self._added
        self.model.tok_embeddings = _EmbeddingTap(model.tok_embeddings, self._begin)

    def take(self) -> list[PendingNorms]:
        """The norms of the passes of `model` since the last call."""
        passes, self._passes = self._passes, []
        return [PendingNorms(_together(values)) for values in passes]

    def arrays(self) -> list[mx.array]:
        """What the passes since the last `take` have measured, to be evaluated with them."""
        return [value for values in self._passes for value in values]

    @staticmethod
    def read(passes: list[PendingNorms]) -> np.ndarray:
        """Float32 `(5, n_layers, positions)` of all positions of these passes; waits for the values."""
        return np.concatenate([pending.read() for pending in passes], axis=-1)

    def _begin(self, x: mx.array) -> None:
        self._passes.append([])
        self._seen(x)

    def _added(self, update: mx.array, stream: mx.array, squares: mx.array | None) -> None:
        if squares is None:
            self._seen(update)
            self._seen(stream)
        else:
            self._passes[-1].append(squares[:, 0])  # (2, S); a view

    def _seen(self, value: mx.array) -> None:
        # A decoded position is kept as it is and measured with all others in one go: four small operations a layer
        # would cost 6 % of the speed. A prompt's positions are measured at once, so that their states can go.
        value = value[:1] if value.shape[0] > 1 else value
        self._passes[-1].append(value if value.shape[1] == 1 else _squared_norm(value))


def _together(values: list[mx.array]) -> list[mx.array]:
    """Norms `(n, S)` of what are still states `(1, 1, dim)`: in one go if all of them are."""
    if all(value.ndim == 3 for value in values):
        return [_squared_norm(mx.concatenate(values, axis=1)).T]
    return [_squared_norm(value) if value.ndim == 3 else value for value in values]


def _squared_norm(x: mx.array) -> mx.array:
    """`(1, N, dim)` -> float32 `(1, N)`."""
    return mx.square(x.astype(mx.float32)).sum(-1)


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
