"""Compares a converted folder with its source, tensor by tensor, in blocks of rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from convert.conversion.plan import PlanStep
from convert.sources.source import Source, SourceTensor
from mlx_llama3.checkpoint.quantization import Quantization

import mlx.core as mx

# Largest relative error of rounding a scale to its dtype: half a unit in the last place.
_ROUNDING = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-9}
_FLOAT16_STEP = 2.0**-24
# Bounds of the error of the microscaling modes, relative to the largest value of a group: half the distance of the two
# largest levels, or the excess of a value over the largest level once the scale is rounded. For nvfp4 the error of
# scales below its smallest one is added. Largest errors measured: 0.200, 0.059, 0.332.
_RELATIVE = {"mxfp4": 0.25, "mxfp8": 0.0625, "nvfp4": 0.34}
_NVFP4_FLOOR = 6 * 2.0**-10


@dataclass(frozen=True)
class Comparison:
    """One tensor of a folder compared with its source.

    `exact`: all values equal the source's, cast to the folder's dtype. `within`: all errors are within the bound of the
    quantization. `worst` is the largest error relative to that bound. `error` and `norm` are the sums of squares of the
    errors and of the values, over blocks that are not exact.
    """

    name: str
    packing: str
    exact: bool
    within: bool
    worst: float
    error: float
    norm: float


class _Errors(NamedTuple):
    exact: bool
    worst: float
    error: float
    norm: float


_EXACT = _Errors(True, 0.0, 0.0, 0.0)


def compare(target: Source, source: Source) -> Iterator[Comparison]:
    """Compare every tensor of `target` with its namesake in `source`. Both must have the same names and shapes."""
    for name, tensor in target.tensors.items():
        yield _compare(tensor, source.tensors[name])


def packing(quantization: Quantization | None, dtype: mx.Dtype) -> str:
    """Dtype or quantization in words: 'bfloat16', '4-bit, groups of 64', 'mxfp4'."""
    if quantization is None:
        return str(dtype).removeprefix("mlx.core.")
    if quantization.mode != "affine":
        return quantization.mode
    return f"{quantization.bits}-bit, groups of {quantization.group_size}"


def _compare(target: SourceTensor, source: SourceTensor) -> Comparison:
    if target.quantization is None:
        measure = _dense
    elif target.quantization == source.quantization:
        measure = _same_quantization
    else:
        measure = _packed
    rows, size = target.shape[0], PlanStep(source, mx.float32).block_rows
    blocks = []
    for start in range(0, rows, size):
        blocks.append(measure(target, source, start, min(start + size, rows)))
    worst = max(block.worst for block in blocks)
    return Comparison(
        name=target.name,
        packing=packing(target.quantization, target.dtype),
        exact=all(block.exact for block in blocks),
        within=worst <= 1,
        worst=worst,
        error=sum(block.error for block in blocks),
        norm=sum(block.norm for block in blocks),
    )


def _dense(target: SourceTensor, source: SourceTensor, start: int, stop: int) -> _Errors:
    expected = source.rows(start, stop).astype(target.dtype)
    actual = target.rows(start, stop)
    exact = mx.array_equal(actual, expected).item()
    return _EXACT if exact else _Errors(False, float("inf"), *_squares(actual, expected))


def _same_quantization(target: SourceTensor, source: SourceTensor, start: int, stop: int) -> _Errors:
    """For a source with the same quantization: packed rows were copied, or quantized again with an adapter fused.

    A copy must be equal to the last bit, because no bound of rounding applies to it.
    """
    actual, expected = target.quantized_rows(start, stop), source.quantized_rows(start, stop)
    pairs = [(actual.weight, expected.weight), (actual.scales, expected.scales), (actual.biases, expected.biases)]
    exact = all(mx.array_equal(a, e.astype(a.dtype)).item() for a, e in pairs if a is not None)
    if exact:
        return _EXACT
    errors = _packed(target, source, start, stop)
    return errors if source.base else errors._replace(exact=False, worst=float("inf"))


def _packed(target: SourceTensor, source: SourceTensor, start: int, stop: int) -> _Errors:
    actual, expected = target.rows(start, stop), source.rows(start, stop)
    if mx.array_equal(actual, expected.astype(actual.dtype)).item():
        return _EXACT
    return _Errors(False, _worst_error(target, actual, expected, start, stop), *_squares(actual, expected))


def _squares(actual: mx.array, expected: mx.array) -> tuple[float, float]:
    """Sums of squares of the errors and of the values; in numpy, which is faster at it on the CPU."""
    expected = np.asarray(expected.astype(mx.float32))
    errors = np.asarray(actual.astype(mx.float32)) - expected
    return float(np.vdot(errors, errors)), float(np.vdot(expected, expected))


def _worst_error(target: SourceTensor, actual: mx.array, expected: mx.array, start: int, stop: int) -> float:
    """The largest error of these rows, relative to the bound of their quantization."""
    quantization = target.quantization
    packed = target.quantized_rows(start, stop)
    groups = (stop - start, -1, quantization.group_size)
    expected = expected.astype(mx.float32).reshape(groups)
    errors = mx.abs(actual.astype(mx.float32).reshape(groups) - expected).max(axis=-1)  # (rows, groups)
    if quantization.mode != "affine":
        largest = mx.abs(expected).max(axis=-1)
        allowed = largest * _RELATIVE[quantization.mode] + (_NVFP4_FLOOR if quantization.mode == "nvfp4" else 0)
    else:
        allowed = _affine_bound(packed.scales, packed.biases, quantization.bits)
    return float(mx.where(errors > 0, errors / allowed, 0).max().item())


def _affine_bound(scales: mx.array, biases: mx.array, bits: int) -> mx.array:
    """Largest error of affine quantization, (rows, groups): one step, plus the rounding of scale and bias.

    MLX shifts the levels so that one of them is zero. A value at the other end may then be a whole step away, all
    others half a step (MLX `mlx/ops.cpp`, `affine_quantize`). One percent is added for the arithmetic of other devices.
    """
    rounding = _ROUNDING[scales.dtype]
    scales, biases = mx.abs(scales.astype(mx.float32)), mx.abs(biases.astype(mx.float32))
    smallest = _FLOAT16_STEP * 2**bits if rounding == _ROUNDING[mx.float16] else 0
    return 1.01 * (scales * (1 + 2**bits * rounding) + biases * rounding) + smallest
