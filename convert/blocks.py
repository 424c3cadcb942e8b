"""From a step of the plan to the blocks of rows that are written, each checked for NaN and infinity."""

from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from convert.plan import Step
from mlx_llama3.errors import UserError

# Largest bits of a finite number, without the sign.
_FINITE_BITS = {mx.float16: 0x7BFF, mx.bfloat16: 0x7F7F}
_CHECKED_ELEMENTS = 1 << 18


class Block(NamedTuple):
    """Rows `start` to `stop` of a step's tensor; one array for each of `Step.entries`."""

    start: int
    stop: int
    arrays: list[mx.array]


def read_blocks(step: Step) -> Iterator[Block]:
    """Read, cast and pack a tensor block by block.

    UserError, naming tensor and file, if a value is NaN or infinite, or becomes so in the dtype that is asked for.
    """
    rows, size = step.tensor.shape[0], step.block_rows
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        arrays = _packed_as_is(step, start, stop) if step.as_is else _converted(step, start, stop)
        mx.eval(arrays)
        _check(step, start, stop, [array for array in arrays if array.dtype not in (mx.uint32, mx.uint8)])
        yield Block(start, stop, arrays)


def _packed_as_is(step: Step, start: int, stop: int) -> list[mx.array]:
    rows = step.tensor.quantized_rows(start, stop)
    if rows.biases is None:
        return [rows.weight, rows.scales]
    return [rows.weight, rows.scales.astype(step.dtype), rows.biases.astype(step.dtype)]


def _converted(step: Step, start: int, stop: int) -> list[mx.array]:
    dense = step.tensor.rows(start, stop).astype(step.dtype)
    how = step.quantization
    if how is None:
        return [dense]
    mx.eval(dense)
    _check(step, start, stop, [dense])
    return mx.quantize(dense, group_size=how.group_size, bits=how.bits, mode=how.mode)


def _check(step: Step, start: int, stop: int, arrays: list[mx.array]) -> None:
    if all(map(is_finite, arrays)):
        return
    tensor = step.tensor
    if is_finite(tensor.rows(start, stop)):
        raise UserError(f"{tensor.origin}: has values too large for {step.dtype}; convert with --dtype bfloat16")
    raise UserError(f"{tensor.origin}: holds NaN or infinity; the checkpoint is damaged, fetch it again")


def is_finite(array: mx.array) -> bool:
    """Whether a floating-point array holds neither NaN nor infinity; in numpy, whose CPU code is far faster at it."""
    mx.eval(array)
    if array.dtype not in _FINITE_BITS:
        return bool(np.isfinite(np.asarray(array)).all())
    bits = np.asarray(array.view(mx.uint16)).reshape(-1)
    pieces = (bits[at : at + _CHECKED_ELEMENTS] for at in range(0, bits.size, _CHECKED_ELEMENTS))
    return all((piece & 0x7FFF).max() <= _FINITE_BITS[array.dtype] for piece in pieces)
