"""Live norms: the L2 norms of the residual stream and of every update, computed as part of the pass itself."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mlx_llama3.model.transformer import Transformer

import mlx.core as mx

# The rows of a norms array. A block's resid_pre is the resid_post of the block before it, so the five points need
# four norms a layer, and one more for the embedding.
POINTS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
_MEASURED = ("attn_out", "resid_mid", "mlp_out", "resid_post")


@dataclass(frozen=True)
class PendingNorms:
    """The squared norms of one pass, as lazy arrays.

    squares: arrays `(n, S)` of one or more points, in the order of the pass: the embedding, then `_MEASURED` of each
        layer.
    """

    squares: list[mx.array]

    def read(self) -> np.ndarray:
        """The norms, float32 `(5, n_layers, S)` in the order of `POINTS`; waits for them."""
        return self._norms

    def positions(self) -> list["PendingNorms"]:
        """The norms of each position separately, for a draft of which only some positions are accepted."""
        return [_OnePosition(self.squares if index == 0 else [], self, index) for index in range(self._length)]

    @property
    def _length(self) -> int:
        return self.squares[0].shape[1]

    @cached_property
    def _norms(self) -> np.ndarray:
        """All norms, put together by NumPy: `mx.stack` on the GPU would be one copy for each array."""
        norms = np.sqrt(np.concatenate([np.asarray(square) for square in self.squares]))  # (1 + 4 L, S)
        # A layer's five points are consecutive rows; its last one is the first of the next layer.
        first = len(_MEASURED) * np.arange(len(norms) // len(_MEASURED))
        return norms[first + np.arange(len(POINTS))[:, None]]


@dataclass(frozen=True)
class _OnePosition(PendingNorms):
    """One position of `all_positions`. Only position 0 lists the arrays in `squares`, so they are evaluated once."""

    all_positions: PendingNorms
    index: int

    def read(self) -> np.ndarray:
        return self.all_positions.read()[..., self.index : self.index + 1]


class NormCapture:
    """Captures the norms of a running model: run `model`, a copy that shares its weights, and call `take` after a pass.

    Of a batch, only the first sequence is measured.
    """

    def __init__(self, model: Transformer) -> None:
        self._passes: list[list[mx.array]] = []
        self.model = copy.copy(model)
        self.model.watch = self._on_add
        self.model.tok_embeddings = _EmbeddingTap(model.tok_embeddings, self._begin)

    def take(self) -> list[PendingNorms]:
        """The norms of the passes of `model` since the last call."""
        passes, self._passes = self._passes, []
        return [PendingNorms(_squared_norms(values)) for values in passes]

    def arrays(self) -> list[mx.array]:
        """The arrays of the passes since the last `take`, to be evaluated together with the pass."""
        return [value for values in self._passes for value in values]

    @staticmethod
    def read(passes: list[PendingNorms]) -> np.ndarray:
        """The norms of all positions of these passes, float32 `(5, n_layers, positions)`; waits for them."""
        return np.concatenate([pending.read() for pending in passes], axis=-1)

    def _begin(self, x: mx.array) -> None:
        self._passes.append([])
        self._append(x)

    def _on_add(self, update: mx.array, stream: mx.array, squares: mx.array | None) -> None:
        if squares is None:
            self._append(update)
            self._append(stream)
        else:
            self._passes[-1].append(squares[:, 0])  # (2, S); a view

    def _append(self, value: mx.array) -> None:
        # States of a decoded position are stored, and their norms computed together by `take`: four small operations a
        # layer would cost 6 % of the speed. Those of a prompt are measured here, so that the states can be freed.
        value = value[:1] if value.shape[0] > 1 else value
        self._passes[-1].append(value if value.shape[1] == 1 else _squared_norm(value))


def _squared_norms(values: list[mx.array]) -> list[mx.array]:
    """Squared norms `(n, S)` of values that are states `(1, 1, dim)` or already norms; in one go if all are states."""
    if all(value.ndim == 3 for value in values):
        return [_squared_norm(mx.concatenate(values, axis=1)).T]
    return [_squared_norm(value) if value.ndim == 3 else value for value in values]


def _squared_norm(x: mx.array) -> mx.array:
    """`(1, N, dim)` -> float32 `(1, N)`."""
    return mx.square(x.astype(mx.float32)).sum(-1)


class _EmbeddingTap:
    """An embedding that calls `hook` with its output; other attributes (for a tied head) are those of the module."""

    def __init__(self, module: Any, hook: Callable[[mx.array], None]) -> None:
        self.module, self._hook = module, hook

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.module(tokens)
        self._hook(x)
        return x

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)
