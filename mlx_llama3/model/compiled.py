"""Blocks compiled with `mx.compile`: their graph is built once and reused for every decoded token.

For a small model, building the graph of a token in Python takes about as long as a fast GPU takes to compute it.
Reusing a compiled graph takes less than half of that. A block has two compiled graphs, one before attention and one
after it: attention itself changes shape with every token, because the cache grows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.layers.rope import RopeTables, StartPos
from mlx_llama3.model.residual import Residual

import mlx.core as mx
import mlx.nn as nn

ResidualStream = mx.array | Residual

_PACKED = ("attention.wqkv", "feed_forward.w13")
_MATRICES = ("attention.wo", "feed_forward.w2")
_MODULES = {"attention", "feed_forward", "attention_norm", "ffn_norm", *_PACKED, *_MATRICES}


class CompiledBlocks:
    """The compiled blocks of a model, shared with its copies (`model.hooks`)."""

    def __init__(self) -> None:
        self._blocks: dict[int, CompiledBlock] = {}  # by the id of the block that was compiled

    def of(self, blocks: Sequence[Any]) -> list[Any]:
        """The blocks, compiled; a block stays as it is if it has a tap or is sharded over several ranks."""
        return [self._blocks.get(id(block)) or self._compiled(block) for block in blocks]

    def _compiled(self, block: Any) -> Any:
        if not _is_pure(block):
            return block
        self._blocks[id(block)] = CompiledBlock(block)  # holds the block, so its id stays unique
        return self._blocks[id(block)]


class CompiledBlock:
    """A block compiled for passes over one position. The compiled graph holds the weights that the block had."""

    def __init__(self, block: Any) -> None:
        self._block, self._scale = block, block.attention.scale
        self._halves: _Halves | None = None
        self._residual_halves: dict[tuple[frozenset[str], bool], _ResidualHalves] = {}  # by (kernels, watched)

    def __call__(
        self, x: ResidualStream, start_pos: StartPos, freqs: RopeTables, mask: str | None, cache: KVCache
    ) -> ResidualStream:
        """`(B, 1, dim)` -> `(B, 1, dim)`. Calls the block itself where RoPE has a table (on the CPU)."""
        if freqs.table is not None:
            return self._block(x, start_pos, freqs, mask, cache)
        if isinstance(x, Residual):
            return self._call_residual(x, freqs, mask, cache)
        if self._halves is None:
            self._halves = _Halves(self._block, freqs)
        q, kv = self._halves.before(x, freqs.offset)
        return self._halves.after(x, cache.attend(q, kv, self._scale, mask))

    def _call_residual(self, x: Residual, freqs: RopeTables, mask: str | None, cache: KVCache) -> Residual:
        variant = x.kernels, x.watch is not None
        if variant not in self._residual_halves:
            self._residual_halves[variant] = _ResidualHalves(self._block, freqs, *variant)
        halves = self._residual_halves[variant]
        q, kv, base, adds_before = halves.before(x.parts, freqs.offset)
        parts, adds_after = halves.after(base, cache.attend(q, kv, self._scale, mask))
        for add in (*adds_before, *adds_after):
            x.watch(*add)
        return x.next(*parts)


class _Halves:
    """A block's compiled graphs before and after attention, for a residual stream that is an array."""

    def __init__(self, block: Any, freqs: RopeTables) -> None:
        def before(x: mx.array, offset: mx.array) -> tuple[mx.array, mx.array]:
            return block.attention.project(block.attention_norm(x), offset, replace(freqs, offset=offset))

        def after(x: mx.array, heads: mx.array) -> mx.array:
            h = x + block.attention.join(heads)
            return h + block.feed_forward(block.ffn_norm(h))

        self.before, self.after = mx.compile(before), mx.compile(after)


class _ResidualHalves:
    """A block's compiled graphs before and after attention, for a residual stream that is a `Residual`, as its parts.

    They also return the arguments for `watch`, one tuple an add, because a compiled graph calls no Python.
    """

    def __init__(self, block: Any, freqs: RopeTables, kernels: frozenset[str], watched: bool) -> None:
        def opened(parts: list[mx.array]) -> tuple[Residual, list[tuple]]:
            adds: list[tuple] = []
            return Residual(*parts, kernels=kernels, watch=(lambda *add: adds.append(add)) if watched else None), adds

        def before(parts: list[mx.array], offset: mx.array) -> tuple:
            x, adds = opened(parts)
            q, kv = block.attention.project(block.attention_norm(x), offset, replace(freqs, offset=offset))
            return q, kv, x.value, adds

        def after(base: mx.array, heads: mx.array) -> tuple:
            x, adds = opened([base])
            h = x + block.attention.join(heads)
            y = h + block.feed_forward(block.ffn_norm(h))
            return y.parts, adds

        self.before, self.after = mx.compile(before), mx.compile(after)


def _is_pure(block: Any) -> bool:
    """Whether the block only computes: it has no tap, and no matrix is sharded over several ranks."""
    modules = dict(block.named_modules()) if isinstance(block, nn.Module) else {}
    if _MODULES - modules.keys():  # a tap is not an `nn.Module`
        return False
    packed = [part for name in _PACKED for part in modules[name].parts]
    matrices = [*packed, *(modules[name] for name in _MATRICES)]
    return all(type(matrix) in (nn.Linear, nn.QuantizedLinear) for matrix in matrices)
