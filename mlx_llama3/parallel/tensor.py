"""Tensor parallelism: which rows and columns of which matrix a rank holds, and where the ranks add up.

As Meta's code splits them (`models/llama3/model.py`, fairscale's layers): `wq wk wv w1 w3` by rows, whole heads to a
rank; `wo` and `w2` by columns, so that each rank has a part of every number of the update, and one sum over the ranks
makes it whole; the embedding by rows of the vocabulary, summed; the head likewise, its logits gathered. Norms are on
every rank.

The vocabulary and the width of the feed-forward need not divide evenly: a rank then holds a row, or a group of
quantized weights, more than another. Heads must.
"""

from collections.abc import Callable
from typing import Any, Protocol

from mlx_llama3.checkpoint.folder import Checkpoint, CheckpointError, Quantization
from mlx_llama3.checkpoint.tensor_shapes import expected_shapes
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.parallel.slices import COLUMNS, ROWS, Shard, SlicedCheckpoint
from mlx_llama3.parallel.world import World

import mlx.core as mx
import mlx.nn as nn


class TensorShard:
    """A rank's rows and columns of every matrix, for `load_model`. `make` makes the empty model."""

    first_layer, has_ends = 0, True

    def __init__(self, world: World, make: Callable[[ModelArgs], Transformer] | None = None) -> None:
        self._world, self._make = world, make or Transformer

    def checkpoint(self, folder: Any) -> SlicedCheckpoint:
        """The part of a model folder. Raises `UserError` where the ranks cannot share its heads or groups."""
        whole = Checkpoint(folder)
        check_heads(whole.args, self._world.size, str(folder))
        rank, size = self._world.rank, self._world.size
        return SlicedCheckpoint(
            whole, {name: shard_of(name, whole, rank, size) for name in expected_shapes(whole.args)}
        )

    def model(self, args: ModelArgs) -> Transformer:
        """An empty model with this rank's number of heads."""
        model = self._make(args)
        for block in model.layers:
            block.attention.n_heads //= self._world.size
            block.attention.n_kv_heads //= self._world.size
        return model

    def connect(self, model: Transformer) -> None:
        """Add the sums and gathers to a model whose matrices are in place."""
        world, bounds = self._world, even(model.args.vocab_size, self._world.size)
        model.tok_embeddings = VocabularyParallel(model.tok_embeddings, bounds, world)
        if not model.args.tie_word_embeddings:
            model.output = VocabularyParallel(model.output, bounds, world)
        for block in model.layers:
            block.attention.wo = RowParallel(block.attention.wo, world)
            block.feed_forward.w2 = RowParallel(block.feed_forward.w2, world)


class Shared(nn.Module):
    """A matrix of which this rank holds a `part`."""

    def __init__(self, part: nn.Module, world: World) -> None:
        super().__init__()
        self.part = part
        self._world = world

    @property
    def weight(self) -> mx.array:
        """There is no whole one here: raises `UserError`."""
        raise self._world.not_whole()


class RowParallel(Shared):
    """A matrix of which each rank holds the columns for its part of the input: the products are summed over ranks."""

    def __call__(self, x: mx.array) -> mx.array:
        """`(..., in / ranks)`, other on every rank -> `(..., out)`, the same on every rank."""
        return self._world.sum(self.part(x))


class VocabularyParallel(Shared):
    """An embedding or a head of which each rank holds the rows of some tokens, `bounds[rank]` to `bounds[rank + 1]`."""

    def __init__(self, part: nn.Module, bounds: list[int], world: World) -> None:
        super().__init__(part, world)
        self._bounds = bounds

    def __call__(self, x: mx.array) -> mx.array:
        """An embedding: token ids `(B, S)` -> `(B, S, dim)`. A head: as `as_linear`."""
        return self._embed(x) if hasattr(self.part, "as_linear") else self._gathered(self.part(x))

    def as_linear(self, x: mx.array) -> mx.array:
        """`(..., dim)` -> `(..., vocab_size)`, the same on every rank."""
        return self._gathered(self.part.as_linear(x))

    def _embed(self, tokens: mx.array) -> mx.array:
        first, end = self._bounds[self._world.rank], self._bounds[self._world.rank + 1]
        here = (tokens >= first) & (tokens < end)
        x = self.part(mx.where(here, tokens - first, 0))
        return self._world.sum(mx.where(here[..., None], x, 0))

    def _gathered(self, logits: mx.array) -> mx.array:
        """The logits of this rank's tokens `(..., rows)` -> of all `(..., vocab_size)`."""
        rows = [end - start for start, end in zip(self._bounds, self._bounds[1:], strict=False)]
        widest = max(rows)
        padded = mx.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, widest - logits.shape[-1])])
        gathered = self._world.gather(padded)  # (ranks, ..., widest)
        if len(set(rows)) == 1:
            return mx.moveaxis(gathered, 0, -2).reshape(*logits.shape[:-1], -1)
        return mx.concatenate([part[..., :count] for part, count in zip(gathered, rows, strict=True)], axis=-1)


def check_heads(args: ModelArgs, size: int, name: str) -> None:
    """Raise `UserError` unless every rank gets as many whole heads."""
    if args.n_kv_heads % size:
        raise CheckpointError(
            f"{name}: {args.n_heads} heads with {args.n_kv_heads} of keys and values cannot be shared out to {size} "
            "ranks; start another number of them, or split the layers instead: --pipeline"
        )


class ModelSpec(Protocol):
    """What `shard_of` asks of a `Checkpoint`, or of one that is only planned (`fit`)."""

    args: ModelArgs
    folder: Any  # for errors

    def quantization(self, module: str) -> Quantization | None:
        """How the matrix of a module (its Hugging Face name) is stored; None if dense."""


def shard_of(name: str, whole: ModelSpec, rank: int, size: int) -> Shard | None:
    """The rows or columns that a rank holds of a tensor (its Hugging Face name); None: all of it.

    Raises `UserError` where groups of quantized weights would be cut.
    """
    args, module = whole.args, name.removesuffix(".weight")
    kind = module.rpartition(".")[2]
    if kind in ("embed_tokens", "lm_head"):
        return Shard(ROWS, *even(args.vocab_size, size)[rank : rank + 2])
    if kind in ("gate_proj", "up_proj", "down_proj"):
        down = module.rpartition(".")[0] + ".down_proj"
        group = _group(whole, down)
        if args.hidden_dim // group < size:
            raise CheckpointError(f"{whole.folder}: {down} has fewer than {size} groups of {group} weights")
        start, end = (group * bound for bound in even(args.hidden_dim // group, size)[rank : rank + 2])
        return Shard(COLUMNS if kind == "down_proj" else ROWS, start, end)
    if kind in ("q_proj", "k_proj", "v_proj", "o_proj"):
        heads = args.n_kv_heads if kind in ("k_proj", "v_proj") else args.n_heads
        width = heads // size * args.head_dim
        if kind == "o_proj" and width % _group(whole, module):
            raise CheckpointError(
                f"{whole.folder}: {module} has groups of {_group(whole, module)} weights, which {size} ranks would cut "
                f"at {width}; start another number of them, or split the layers instead: --pipeline"
            )
        return Shard(COLUMNS if kind == "o_proj" else ROWS, rank * width, (rank + 1) * width)
    return None


def even(total: int, size: int) -> list[int]:
    """Where to cut `total` into `size` parts that differ by one at most: `size + 1` bounds."""
    return [total * rank // size for rank in range(size + 1)]


def _group(whole: ModelSpec, module: str) -> int:
    """So many columns must stay together."""
    quantization = whole.quantization(module)
    return (
        1 if quantization is None else max(quantization.group_size, 32)
    )  # nvfp4: a scale for 16, but a word of packed weights a group
