"""Pipeline: whole layers to a rank, the stream handed from one rank to the next and back to rank 0.

For models whose heads cannot be shared out. It makes room for a larger model, but not speed: one rank works at a time.
Rank 0 has the embedding, the head, and so many layers less.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

from mlx_llama3.checkpoint.folder import Checkpoint, CheckpointError
from mlx_llama3.checkpoint.tensor_shapes import count_weights, expected_shapes
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.settings import DEFAULT, CacheSettings
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.model.residual import plain
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.parallel.slices import SlicedCheckpoint
from mlx_llama3.parallel.world import World

import mlx.core as mx
import mlx.nn as nn


class PipelineShard:
    """A rank's layers, for `load_model`. `make` makes the empty model."""

    def __init__(
        self, world: World, make: "Callable[[ModelArgs, PipelineShard], PipelineTransformer] | None" = None
    ) -> None:
        self.world, self._make = world, make or PipelineTransformer
        self.has_ends = world.rank == 0
        self.layers = range(0)

    @property
    def first_layer(self) -> int:
        """The number that the first layer here has in the whole model."""
        return self.layers.start

    def checkpoint(self, folder: Any) -> SlicedCheckpoint:
        """The part of a model folder. Raises `UserError` if there are fewer layers than ranks."""
        whole = Checkpoint(folder)
        bounds = layer_bounds(whole.args, self.world.size, str(folder))
        self.layers = range(*bounds[self.world.rank : self.world.rank + 2])
        return SlicedCheckpoint(whole, {name: None for name in expected_shapes(whole.args) if self._has(name)})

    def model(self, args: ModelArgs) -> "PipelineTransformer":
        """An empty model with this rank's layers."""
        return self._make(args, self)

    def connect(self, model: Transformer) -> None:
        """Nothing to add: `PipelineTransformer` sends and receives."""

    def _has(self, name: str) -> bool:
        """Whether a tensor (its Hugging Face name) is for this rank."""
        words = name.split(".")
        return int(words[2]) in self.layers if words[1] == "layers" else self.has_ends


class PipelineTransformer(Transformer):
    """Some of the layers; on rank 0 also the embedding and the head.

    `residual` gives the stream after this rank's layers, which is on its way to the next rank; on rank 0 it comes back
    from the last one, and is the whole model's.
    """

    def __init__(self, args: ModelArgs, part: PipelineShard) -> None:
        super().__init__(replace(args, n_layers=len(part.layers)))
        self._local, self.args = self.args, args
        self._world = part.world
        if not part.has_ends:
            self.tok_embeddings = _FromRank(self._world, args.dim, lambda: self.layers[0].attention_norm.weight.dtype)
            self.pop("output", None)

    def residual(self, tokens: mx.array, start_pos: int = 0, cache: list[KVCache] | None = None) -> mx.array:
        world = self._world
        x = plain(super().residual(tokens, start_pos, cache))
        sent = world.send(x, (world.rank + 1) % world.size)
        if world.rank:
            return sent
        mx.async_eval(sent)  # queued first: what comes back cannot come before
        return world.receive(x.shape, x.dtype, world.size - 1)

    def make_cache(self, settings: CacheSettings = DEFAULT) -> list[KVCache]:
        whole, self.args = self.args, self._local
        try:
            return super().make_cache(settings)
        finally:
            self.args = whole


class _FromRank(nn.Module):
    """Stands where the embedding is on rank 0: gives the stream that the rank before has made of the same tokens."""

    def __init__(self, world: World, dim: int, dtype: Callable[[], mx.Dtype]) -> None:
        super().__init__()
        self._world, self._dim, self._dtype = world, dim, dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        """`(B, S)` -> `(B, S, dim)`."""
        return self._world.receive((*tokens.shape, self._dim), self._dtype(), self._world.rank - 1)


def layer_bounds(args: ModelArgs, size: int, name: str) -> list[int]:
    """Where the layers are cut, `size + 1` bounds, so that the rank with the most weights has as few as can be.

    Raises `UserError` if there are not as many layers as ranks.
    """
    if args.n_layers < size:
        raise CheckpointError(f"{name}: {args.n_layers} layers cannot be shared out to {size} ranks")
    layer = sum(prod(shape) for key, shape in expected_shapes(args).items() if key.startswith("model.layers.0."))
    ends = (count_weights(args) - args.n_layers * layer) / layer  # the embedding and the head, in layers
    others = size - 1

    def most(first: int) -> float:
        """Of any rank, in layers, when rank 0 has so many."""
        return max(first + ends, -(-(args.n_layers - first) // others))

    if size == 1:
        return [0, args.n_layers]
    first = min(range(1, args.n_layers - others + 1), key=most)
    return [0, *(first + (args.n_layers - first) * rank // others for rank in range(size))]


def layer_counts(args: ModelArgs, size: int, name: str) -> list[int]:
    """How many layers each rank has."""
    return [end - start for start, end in pairwise(layer_bounds(args, size, name))]
