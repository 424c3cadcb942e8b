"""Blocks whose operations are recorded once and replayed for every token (`mx.compile`).

Building the graph of a token in Python takes about as long as a fast GPU takes to compute it, for a small model;
replaying a recording takes less than half of that. Attention stands between two recordings, because the cache is longer
with every token.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlx_llama3.cache import KVCache
from mlx_llama3.residual import Residual
from mlx_llama3.rope import Freqs, Position

if TYPE_CHECKING:
    from mlx_llama3.model import TransformerBlock

Stream = mx.array | Residual


class Recordings:
    """The recorded blocks of a model and of all its twins, each by the block that it was made of."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[Any, Any]] = {}

    def of(self, blocks: Sequence[Any]) -> list[Any]:
        """Each block recorded, or itself where something in it may not be: a tap, or a sum over several machines."""
        return [self._block(block) for block in blocks]

    def _block(self, block: Any) -> Any:
        if id(block) not in self._blocks:  # kept with the block: so long its id is no other one's
            self._blocks[id(block)] = block, RecordedBlock(block) if _is_pure(block) else block
        return self._blocks[id(block)][1]


class RecordedBlock:
    """As the block, for passes over one position. Weights are part of the recording: it is of the block as it was."""

    def __init__(self, block: "TransformerBlock") -> None:
        self._block = block
        self._attention = block.attention
        self._before, self._after = mx.compile(self._project), mx.compile(self._update)

    def __call__(self, x: Stream, start_pos: Position, freqs: Freqs, mask: str | None, cache: KVCache) -> Stream:
        """`(B, 1, dim)` -> `(B, 1, dim)`."""
        if freqs.table is not None:
            return self._block(x, start_pos, freqs, mask, cache)
        waits = isinstance(x, Residual)
        how = (x.fused, True, x.watch is not None) if waits else (False, False, False)
        q, kv, parts, told = self._before(x.parts if waits else [x], [freqs.offset, freqs.inverse, freqs.periods], how)
        heads = cache.attend(q, kv, self._attention.scale, mask)
        after, told_after = self._after(parts, heads, how)
        if not waits:
            return after[0]
        for seen in (*told, *told_after):
            x.watch(*seen)
        return x.next(*after)

    def _project(self, parts: list[mx.array], freqs: list[mx.array], how: tuple[bool, bool, bool]) -> tuple:
        """What comes before attention: queries, keys and values, the stream's parts, what a watch is told."""
        x, told = _watched(parts, how)
        q, kv = self._attention.project(self._block.attention_norm(x), freqs[0], Freqs(*freqs))
        return q, kv, x.parts, told

    def _update(self, parts: list[mx.array], heads: mx.array, how: tuple[bool, bool, bool]) -> tuple:
        """What comes after: the stream's parts, what a watch is told."""
        x, told = _watched(parts, how)
        h = x + self._attention.join(heads)
        y = h + self._block.feed_forward(self._block.ffn_norm(h))
        return y.parts if how[1] else [y.value], told


def _watched(parts: list[mx.array], how: tuple[bool, bool, bool]) -> tuple[Residual, list[tuple]]:
    """A stream of these parts, fused or not, and the list that it tells of its adds if it is watched."""
    fused, _waits, watched = how
    told: list[tuple] = []
    return Residual(*parts, fused=fused, watch=(lambda *seen: told.append(seen)) if watched else None), told


def _is_pure(block: Any) -> bool:
    """Whether the block is made of modules that do nothing but compute."""
    parts = block.leaf_modules() if isinstance(block, nn.Module) else {}
    return bool(parts)
