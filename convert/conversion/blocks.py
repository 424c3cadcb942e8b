"""Reads the tensors of a plan as blocks of rows, cast or quantized, each checked for NaN and infinity."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from convert.conversion.fp4 import quantize
from convert.conversion.plan import PlanStep
from mlx_llama3.errors import UserError

import mlx.core as mx

# The bits of the largest finite number, without the sign.
_FINITE_BITS = {mx.float16: 0x7BFF, mx.bfloat16: 0x7F7F}
_CHECKED_ELEMENTS = 1 << 18


class Block(NamedTuple):
    """Rows `start` to `stop` of one tensor.

    `arrays` are what is written, one per entry of `PlanStep.entries`; `checked` are the arrays that must be finite.
    """

    step: PlanStep
    start: int
    stop: int
    arrays: list[mx.array]
    checked: list[mx.array]


def read_blocks(steps: Iterable[PlanStep]) -> Iterator[Block]:
    """Read, cast and quantize tensors block by block. MLX computes the next block while the caller writes this one.

    Raises `UserError`, with tensor and file, if a value is NaN or infinite, or overflows the requested dtype.
    """
    pending: Block | None = None
    for step in steps:
        rows, size = step.tensor.shape[0], step.block_rows
        for start in range(0, rows, size):
            block = _begin(step, start, min(start + size, rows))
            if pending is not None:
                yield _finish(pending)
            pending = block
    if pending is not None:
        yield _finish(pending)


def _begin(step: PlanStep, start: int, stop: int) -> Block:
    """Queue the computation of a block; `_finish` waits for it."""
    if step.as_is:
        arrays = _packed_as_is(step, start, stop)
        checked = [array for array in arrays if array.dtype not in (mx.uint32, mx.uint8)]
    else:
        dense = step.tensor.rows(start, stop).astype(step.dtype)
        arrays = checked = [dense]
        if quantization := step.quantization:
            arrays = quantize(dense, group_size=quantization.group_size, bits=quantization.bits, mode=quantization.mode)
            # Scales can overflow although all values are finite, if the values of a group lie far apart.
            checked = [dense, *(array for array in arrays if array.dtype == step.dtype)]
    mx.async_eval(arrays, checked)
    return Block(step, start, stop, arrays, checked)


def _packed_as_is(step: PlanStep, start: int, stop: int) -> list[mx.array]:
    rows = step.tensor.quantized_rows(start, stop)
    if rows.biases is None:
        return [rows.weight, rows.scales]
    return [rows.weight, rows.scales.astype(step.dtype), rows.biases.astype(step.dtype)]


def _finish(block: Block) -> Block:
    mx.eval(block.arrays, block.checked)
    if all(map(is_finite, block.checked)):
        return block
    tensor = block.step.tensor
    if is_finite(tensor.rows(block.start, block.stop)):
        raise UserError(f"{tensor.origin}: has values too large for {block.step.dtype}; convert with --dtype bfloat16")
    raise UserError(f"{tensor.origin}: holds NaN or infinity; the checkpoint is damaged, fetch it again")


def is_finite(array: mx.array) -> bool:
    """Whether a floating-point array is free of NaN and infinity; in numpy, which is far faster at it on the CPU."""
    mx.eval(array)
    if array.dtype not in _FINITE_BITS:
        return bool(np.isfinite(np.asarray(array)).all())
    bits = np.asarray(array.view(mx.uint16)).reshape(-1)
    pieces = (bits[at : at + _CHECKED_ELEMENTS] for at in range(0, bits.size, _CHECKED_ELEMENTS))
    return all((piece & 0x7FFF).max() <= _FINITE_BITS[array.dtype] for piece in pieces)
