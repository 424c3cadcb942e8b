"""Pipeline parallelism: each rank has some layers; the residual stream goes from rank to rank, and back to rank 0.

It is for models whose heads cannot be split evenly. It allows a larger model, but is not faster: one rank works at a
time. Rank 0 has the embedding and the head, and fewer layers in return.
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
    """The layers of this rank, for `load_model`. `make` builds the empty model."""

    def __init__(
        self, world: World, make: "Callable[[ModelArgs, PipelineShard], PipelineTransformer] | None" = None
    ) -> None:
        self.world, self._make = world, make or PipelineTransformer
        self.has_ends = world.rank == 0
        self.layers = range(0)

    @property
    def first_layer(self) -> int:
        """The index of this rank's first layer in the whole model."""
        return self.layers.start

    def checkpoint(self, folder: Any) -> SlicedCheckpoint:
        """This rank's tensors of a model folder. Raises `UserError` if there are fewer layers than ranks."""
        checkpoint = Checkpoint(folder)
        bounds = layer_bounds(checkpoint.args, self.world.size, str(folder))
        self.layers = range(*bounds[self.world.rank : self.world.rank + 2])
        names = filter(self._has, expected_shapes(checkpoint.args))
        return SlicedCheckpoint(checkpoint, dict.fromkeys(names))

    def model(self, args: ModelArgs) -> "PipelineTransformer":
        """An empty model with this rank's layers."""
        return self._make(args, self)

    def connect(self, model: Transformer) -> None:
        """Does nothing: `PipelineTransformer` sends and receives."""

    def _has(self, name: str) -> bool:
        """Whether this rank has a tensor (by its Hugging Face name)."""
        words = name.split(".")
        return int(words[2]) in self.layers if words[1] == "layers" else self.has_ends


class PipelineTransformer(Transformer):
    """The layers of one rank; on rank 0 also the embedding and the head.

    `residual` sends the residual stream after this rank's layers to the next rank. On a worker it returns that stream;
    on rank 0 it returns the stream of the whole model, which the last rank sends back.
    """

    def __init__(self, args: ModelArgs, shard: PipelineShard) -> None:
        super().__init__(replace(args, n_layers=len(shard.layers)))
        self._local_args, self.args = self.args, args
        self._world = shard.world
        if not shard.has_ends:
            self.tok_embeddings = _Received(self._world, args.dim, lambda: self.layers[0].attention_norm.weight.dtype)
            self.pop("output", None)

    def residual(self, tokens: mx.array, start_pos: int = 0, cache: list[KVCache] | None = None) -> mx.array:
        world = self._world
        x = plain(super().residual(tokens, start_pos, cache))
        sent = world.send(x, (world.rank + 1) % world.size)
        if world.rank:
            return sent
        mx.async_eval(sent)  # queued before the receive: the last rank's stream depends on it
        return world.receive(x.shape, x.dtype, world.size - 1)

    def make_cache(self, settings: CacheSettings = DEFAULT) -> list[KVCache]:
        args, self.args = self.args, self._local_args
        try:
            return super().make_cache(settings)
        finally:
            self.args = args


class _Received(nn.Module):
    """Takes the place of the embedding on a worker: receives the residual stream from the previous rank."""

    def __init__(self, world: World, dim: int, dtype: Callable[[], mx.Dtype]) -> None:
        super().__init__()
        self._world, self._dim, self._dtype = world, dim, dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        """`(B, S)` -> `(B, S, dim)`."""
        return self._world.receive((*tokens.shape, self._dim), self._dtype(), self._world.rank - 1)


def layer_bounds(args: ModelArgs, size: int, name: str) -> list[int]:
    """The `size + 1` bounds of the ranks' layers, chosen so that the largest number of weights on a rank is minimal.

    `name`: the model's, for the error. Raises `UserError` if there are fewer layers than ranks.
    """
    if args.n_layers < size:
        raise CheckpointError(f"{name}: {args.n_layers} layers cannot be split over {size} ranks")
    layer = sum(prod(shape) for key, shape in expected_shapes(args).items() if key.startswith("model.layers.0."))
    ends = (count_weights(args) - args.n_layers * layer) / layer  # the embedding and the head, in layers
    workers = size - 1

    def largest(first: int) -> float:
        """The most weights on any rank, in layers, if rank 0 has `first` layers."""
        return max(first + ends, -(-(args.n_layers - first) // workers))

    if size == 1:
        return [0, args.n_layers]
    first = min(range(1, args.n_layers - workers + 1), key=largest)
    return [0, *(first + (args.n_layers - first) * rank // workers for rank in range(size))]


def layer_counts(args: ModelArgs, size: int, name: str) -> list[int]:
    """The number of layers on each rank. Arguments and errors as for `layer_bounds`."""
    return [end - start for start, end in pairwise(layer_bounds(args, size, name))]
