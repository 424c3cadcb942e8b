"""Tensor parallelism: which rows or columns of each matrix a rank holds, and where the ranks exchange results.

The matrices are split as in Meta's code (`models/llama3/model.py`, fairscale's layers):

- `wq wk wv w1 w3` by rows; a rank has whole heads.
- `wo` and `w2` by columns; each rank computes a partial sum of the update, and a sum over the ranks completes it.
- The embedding and the head by rows of the vocabulary; embeddings are summed over the ranks, logits are gathered.
- Norms are on every rank.

The number of heads must be a multiple of the number of ranks. The vocabulary and the width of the feed-forward need
not: some ranks then hold one row, or one group of quantized weights, more than others.
"""

from collections.abc import Callable
from typing import Any, Protocol

from mlx_llama3.checkpoint.folder import Checkpoint, CheckpointError
from mlx_llama3.checkpoint.quantization import Quantization
from mlx_llama3.checkpoint.tensor_shapes import expected_shapes
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.parallel.slices import COLUMNS, ROWS, Shard, SlicedCheckpoint
from mlx_llama3.parallel.world import World

import mlx.core as mx
import mlx.nn as nn


class TensorShard:
    """This rank's rows and columns of every matrix, for `load_model`. `make` builds the empty model."""

    first_layer, has_ends = 0, True

    def __init__(self, world: World, make: Callable[[ModelArgs], Transformer] | None = None) -> None:
        self._world, self._make = world, make or Transformer

    def checkpoint(self, folder: Any) -> SlicedCheckpoint:
        """This rank's tensors of a model folder. Raises `UserError` if its heads or groups cannot be split."""
        checkpoint = Checkpoint(folder)
        check_heads(checkpoint.args, self._world.size, str(folder))
        rank, size = self._world.rank, self._world.size
        shards = {name: shard_of(name, checkpoint, rank, size) for name in expected_shapes(checkpoint.args)}
        return SlicedCheckpoint(checkpoint, shards)

    def model(self, args: ModelArgs) -> Transformer:
        """An empty model with this rank's number of heads."""
        model = self._make(args)
        for block in model.layers:
            block.attention.n_heads //= self._world.size
            block.attention.n_kv_heads //= self._world.size
        return model

    def connect(self, model: Transformer) -> None:
        """Add the sums and gathers to a model that has its matrices."""
        world, bounds = self._world, even_bounds(model.args.vocab_size, self._world.size)
        model.tok_embeddings = VocabularyParallel(model.tok_embeddings, bounds, world)
        if not model.args.tie_word_embeddings:
            model.output = VocabularyParallel(model.output, bounds, world)
        for block in model.layers:
            block.attention.wo = RowParallel(block.attention.wo, world)
            block.feed_forward.w2 = RowParallel(block.feed_forward.w2, world)


class ShardedMatrix(nn.Module):
    """A matrix of which this rank holds a `shard`."""

    def __init__(self, shard: nn.Module, world: World) -> None:
        super().__init__()
        self.shard = shard
        self._world = world

    @property
    def weight(self) -> mx.array:
        """Raises `UserError`: the whole matrix is on no single rank."""
        raise self._world.not_whole()


class RowParallel(ShardedMatrix):
    """A matrix split by columns: each rank multiplies its part of the input, and the products are summed over ranks."""

    def __call__(self, x: mx.array) -> mx.array:
        """`(..., in / ranks)`, different on each rank -> `(..., out)`, the same on all ranks."""
        return self._world.sum(self.shard(x))


class VocabularyParallel(ShardedMatrix):
    """An embedding or a head split by tokens: each rank holds the rows from `bounds[rank]` to `bounds[rank + 1]`."""

    def __init__(self, shard: nn.Module, bounds: list[int], world: World) -> None:
        super().__init__(shard, world)
        self._bounds = bounds

    def __call__(self, x: mx.array) -> mx.array:
        """An embedding: token ids `(B, S)` -> `(B, S, dim)`. A head: as `as_linear`."""
        return self._embed(x) if hasattr(self.shard, "as_linear") else self._gathered(self.shard(x))

    def as_linear(self, x: mx.array) -> mx.array:
        """`(..., dim)` -> `(..., vocab_size)`, the same on all ranks."""
        return self._gathered(self.shard.as_linear(x))

    def _embed(self, tokens: mx.array) -> mx.array:
        first, end = self._bounds[self._world.rank], self._bounds[self._world.rank + 1]
        is_local = (tokens >= first) & (tokens < end)
        x = self.shard(mx.where(is_local, tokens - first, 0))
        return self._world.sum(mx.where(is_local[..., None], x, 0))

    def _gathered(self, logits: mx.array) -> mx.array:
        """Logits of this rank's tokens `(..., rows)` -> logits of all tokens `(..., vocab_size)`."""
        rows = [end - start for start, end in zip(self._bounds, self._bounds[1:], strict=False)]
        widest = max(rows)
        padded = mx.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, widest - logits.shape[-1])])
        gathered = self._world.gather(padded)  # (ranks, ..., widest)
        if len(set(rows)) == 1:
            return mx.moveaxis(gathered, 0, -2).reshape(*logits.shape[:-1], -1)
        return mx.concatenate([piece[..., :count] for piece, count in zip(gathered, rows, strict=True)], axis=-1)


def check_heads(args: ModelArgs, size: int, name: str) -> None:
    """Raise `UserError` unless every rank gets the same number of whole heads. `name`: the model's, for the error."""
    if args.n_kv_heads % size:
        raise CheckpointError(
            f"{name}: {args.n_heads} query heads and {args.n_kv_heads} KV heads cannot be split evenly over {size} "
            "ranks; start another number of ranks, or split the layers instead: --pipeline"
        )


class ModelSpec(Protocol):
    """What `shard_of` needs of a `Checkpoint`, or of a model that exists only on paper (`benchmarks.parallel_fit`)."""

    args: ModelArgs
    folder: Any  # for errors

    def quantization(self, module: str) -> Quantization | None:
        """The quantization of a module's matrix (by its Hugging Face name); None if it is dense."""


def shard_of(name: str, spec: ModelSpec, rank: int, size: int) -> Shard | None:
    """The rows or columns of a tensor (by its Hugging Face name) that a rank holds; None if it holds the whole tensor.

    Raises `UserError` if a group of quantized weights would be split.
    """
    args, module = spec.args, name.removesuffix(".weight")
    kind = module.rpartition(".")[2]
    if kind in ("embed_tokens", "lm_head"):
        return Shard(ROWS, *even_bounds(args.vocab_size, size)[rank : rank + 2])
    if kind in ("gate_proj", "up_proj", "down_proj"):
        down = module.rpartition(".")[0] + ".down_proj"
        group = _group_size(spec, down)
        if args.hidden_dim // group < size:
            raise CheckpointError(f"{spec.folder}: {down} has fewer than {size} groups of {group} weights")
        start, end = (group * bound for bound in even_bounds(args.hidden_dim // group, size)[rank : rank + 2])
        return Shard(COLUMNS if kind == "down_proj" else ROWS, start, end)
    if kind in ("q_proj", "k_proj", "v_proj", "o_proj"):
        heads = args.n_kv_heads if kind in ("k_proj", "v_proj") else args.n_heads
        width = heads // size * args.head_dim
        if kind == "o_proj" and width % _group_size(spec, module):
            raise CheckpointError(
                f"{spec.folder}: {module} has groups of {_group_size(spec, module)} weights, which {size} ranks "
                f"would split at {width}; start another number of ranks, or split the layers instead: --pipeline"
            )
        return Shard(COLUMNS if kind == "o_proj" else ROWS, rank * width, (rank + 1) * width)
    return None


def even_bounds(total: int, size: int) -> list[int]:
    """The `size + 1` bounds that split `total` into `size` parts, which differ by one at most."""
    return [total * rank // size for rank in range(size + 1)]


def _group_size(spec: ModelSpec, module: str) -> int:
    """The number of columns that must stay on one rank."""
    quantization = spec.quantization(module)
    # nvfp4 has a scale for 16 weights, but MLX packs at least 32 columns.
    return 1 if quantization is None else max(quantization.group_size, 32)
