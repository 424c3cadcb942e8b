"""How much of an adapter's update is lost when the fused tensor is rounded to 16 bits or packed.

An update is often smaller than the steps of a packed matrix. Added to values that lie on those steps, it is rounded
away: the matrix comes out as it was.
"""

from collections.abc import Callable

from convert.sources.source import SourceTensor

import mlx.core as mx

# The largest share of an update that may be lost.
MOST_LOST = 0.1
_Rows = Callable[[int, int], mx.array]


def lost_share(tensor: SourceTensor, written: _Rows, plain: _Rows, block_rows: int) -> float:
    """The share of the update of `tensor` that does not arrive: 0 if all of it does, 1 if none.

    What arrived is projected onto what was meant: |1 - <arrived, meant> / <meant, meant>|, over all values, at most 1.
    `meant` is the fused tensor less its base, `arrived` the same of their values once they are written. So the noise of
    a packing, which is as large without the adapter, does not count, unless an update is so small that noise arrives
    in its place. An update of nothing loses 0.

    Args:
        tensor: a tensor with an adapter fused (`tensor.base` is set).
        written: (start, stop) -> these rows as a reader of the result gets them.
        plain: the same, had the adapter not been fused.
        block_rows: rows to read at a time.
    """
    arrived = meant = 0.0
    for start in range(0, tensor.shape[0], block_rows):
        stop = min(start + block_rows, tensor.shape[0])
        wanted = difference(tensor.rows(start, stop), tensor.base.rows(start, stop))
        arrived += mx.sum(difference(written(start, stop), plain(start, stop)) * wanted).item()
        meant += mx.sum(wanted * wanted).item()
    return min(1.0, abs(1 - arrived / meant)) if meant else 0.0


def difference(one: mx.array, other: mx.array) -> mx.array:
    """`one` less `other`, in float32."""
    return one.astype(mx.float32) - other.astype(mx.float32)
