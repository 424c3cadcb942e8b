"""Blocks whose operations are recorded once and replayed for every token (`mx.compile`).

Building the graph of a token in Python takes about as long as a fast GPU takes to compute it, for a small model;
replaying a recording takes less than half of that. Attention stands between two recordings, because the cache is longer
with every token.
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
    """The recorded blocks of a model and of all its twins, each by the block that it was made of."""

    def __init__(self) -> None:
        self._blocks: dict[int, CompiledBlock] = {}

    def of(self, blocks: Sequence[Any]) -> list[Any]:
        """Each block recorded, or itself where something in it may not be: a tap, or a sum over several machines."""
        return [self._blocks.get(id(block)) or self._compiled(block) for block in blocks]

    def _compiled(self, block: Any) -> Any:
        if not _is_pure(block):
            return block
        self._blocks[id(block)] = CompiledBlock(block)  # which keeps the block: so long its id is no other one's
        return self._blocks[id(block)]


class CompiledBlock:
    """As the block, for passes over one position. Weights are part of the recording: it is of the block as it was."""

    def __init__(self, block: Any) -> None:
        self._block, self._scale = block, block.attention.scale
        self._plain: _Halves | None = None
        self._streams: dict[tuple[bool, bool], _Halves] = {}

    def __call__(
        self, x: ResidualStream, start_pos: StartPos, freqs: RopeTables, mask: str | None, cache: KVCache
    ) -> ResidualStream:
        """`(B, 1, dim)` -> `(B, 1, dim)`."""
        if freqs.table is not None:
            return self._block(x, start_pos, freqs, mask, cache)
        if isinstance(x, Residual):
            return self._through(x, freqs, mask, cache)
        if self._plain is None:
            self._plain = _Halves(self._block, freqs)
        q, kv = self._plain.before(x, freqs.offset)
        return self._plain.after(x, cache.attend(q, kv, self._scale, mask))

    def _through(self, x: Residual, freqs: RopeTables, mask: str | None, cache: KVCache) -> Residual:
        how = x.fused, x.watch is not None
        if how not in self._streams:
            self._streams[how] = _StreamHalves(self._block, freqs, *how)
        halves = self._streams[how]
        q, kv, base, told = halves.before(x.parts, freqs.offset)
        parts, told_after = halves.after(base, cache.attend(q, kv, self._scale, mask))
        for seen in (*told, *told_after):
            x.watch(*seen)
        return x.next(*parts)


class _Halves:
    """The recordings of what comes before and after attention, of a stream that is an array."""

    def __init__(self, block: Any, freqs: RopeTables) -> None:
        def before(x: mx.array, offset: mx.array) -> tuple[mx.array, mx.array]:
            return block.attention.project(block.attention_norm(x), offset, replace(freqs, offset=offset))

        def after(x: mx.array, heads: mx.array) -> mx.array:
            h = x + block.attention.join(heads)
            return h + block.feed_forward(block.ffn_norm(h))

        self.before, self.after = mx.compile(before), mx.compile(after)


class _StreamHalves:
    """As `_Halves`, of a `Residual` in its parts; with what its watch is to be told, which a replay does not call."""

    def __init__(self, block: Any, freqs: RopeTables, fused: bool, watched: bool) -> None:
        def opened(parts: list[mx.array]) -> tuple[Residual, list[tuple]]:
            told: list[tuple] = []
            return Residual(*parts, fused=fused, watch=(lambda *seen: told.append(seen)) if watched else None), told

        def before(parts: list[mx.array], offset: mx.array) -> tuple:
            x, told = opened(parts)
            q, kv = block.attention.project(block.attention_norm(x), offset, replace(freqs, offset=offset))
            return q, kv, x.value, told

        def after(base: mx.array, heads: mx.array) -> tuple:
            x, told = opened([base])
            h = x + block.attention.join(heads)
            y = h + block.feed_forward(block.ffn_norm(h))
            return y.parts, told

        self.before, self.after = mx.compile(before), mx.compile(after)


def _is_pure(block: Any) -> bool:
    """Whether the block does nothing but compute: no tap stands in it, and no matrix lies on several machines."""
    modules = dict(block.named_modules()) if isinstance(block, nn.Module) else {}
    if _MODULES - modules.keys():  # a tap is no module
        return False
    packed = [part for name in _PACKED for part in modules[name].parts]
    matrices = [*packed, *(modules[name] for name in _MATRICES)]
    return all(type(matrix) in (nn.Linear, nn.QuantizedLinear) for matrix in matrices)
