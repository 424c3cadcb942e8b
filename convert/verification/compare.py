"""What was written, held against what it came from, tensor by tensor and block by block."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from convert.conversion.plan import PlanStep
from convert.sources.source import Source, SourceTensor
from mlx_llama3.checkpoint.quantization import Quantization

import mlx.core as mx

# Half a step of the last bit of a scale, relative to it.
_ROUNDING = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-9}
_FLOAT16_STEP = 2.0**-24
# Largest error of the microscaling modes, relative to the largest value of a group: half the distance of the two
# largest levels, or what lies beyond the largest one after the scale is rounded. nvfp4 also loses what its smallest
# scale is too large for. Seen at most: 0.200, 0.059, 0.332.
_RELATIVE = {"mxfp4": 0.25, "mxfp8": 0.0625, "nvfp4": 0.34}
_NVFP4_FLOOR = 6 * 2.0**-10


@dataclass(frozen=True)
class Comparison:
    """One tensor of a folder beside its source.

    `exact` says that all values are those of the source (cast to the folder's dtype), `within` that they lie within the
    error bound of their packing. `worst` is the largest error relative to that bound, `error` and `norm` the sums of
    squares of errors and values in blocks that are not exact.
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
    """Compare every tensor of `target` with that of `source` of the same name; both have the same names and shapes."""
    for name, tensor in target.tensors.items():
        yield _compare(tensor, source.tensors[name])


def packing(quantization: Quantization | None, dtype: mx.Dtype) -> str:
    """'bfloat16', '4-bit, groups of 64', 'mxfp4'."""
    if quantization is None:
        return str(dtype).removeprefix("mlx.core.")
    if quantization.mode != "affine":
        return quantization.mode
    return f"{quantization.bits}-bit, groups of {quantization.group_size}"


def _compare(target: SourceTensor, source: SourceTensor) -> Comparison:
    if target.quantization is None:
        measure = _dense
    elif target.quantization == source.quantization:
        measure = _packed_alike
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
    found = target.rows(start, stop)
    exact = mx.array_equal(found, expected).item()
    return _EXACT if exact else _Errors(False, float("inf"), *_squares(found, expected))


def _packed_alike(target: SourceTensor, source: SourceTensor, start: int, stop: int) -> _Errors:
    """The source holds the matrix packed in the same way: it was passed on, or an adapter fused and packed again."""
    found, expected = target.quantized_rows(start, stop), source.quantized_rows(start, stop)
    pairs = [(found.weight, expected.weight), (found.scales, expected.scales), (found.biases, expected.biases)]
    exact = all(mx.array_equal(f, e.astype(f.dtype)).item() for f, e in pairs if f is not None)
    return _EXACT if exact else _packed(target, source, start, stop)


def _packed(target: SourceTensor, source: SourceTensor, start: int, stop: int) -> _Errors:
    found, expected = target.rows(start, stop), source.rows(start, stop)
    if mx.array_equal(found, expected.astype(found.dtype)).item():
        return _EXACT
    return _Errors(False, _beyond(target, found, expected, start, stop), *_squares(found, expected))


def _squares(found: mx.array, expected: mx.array) -> tuple[float, float]:
    """Sums of squares of the errors and of the values; in numpy, whose sums are faster on the CPU."""
    expected = np.asarray(expected.astype(mx.float32))
    apart = np.asarray(found.astype(mx.float32)) - expected
    return float(np.vdot(apart, apart)), float(np.vdot(expected, expected))


def _beyond(target: SourceTensor, found: mx.array, expected: mx.array, start: int, stop: int) -> float:
    """The largest error of these rows, in units of what their packing may cost."""
    quantization = target.quantization
    packed = target.quantized_rows(start, stop)
    groups = (stop - start, -1, quantization.group_size)
    expected = expected.astype(mx.float32).reshape(groups)
    apart = mx.abs(found.astype(mx.float32).reshape(groups) - expected).max(axis=-1)  # (rows, groups)
    if quantization.mode != "affine":
        largest = mx.abs(expected).max(axis=-1)
        allowed = largest * _RELATIVE[quantization.mode] + (_NVFP4_FLOOR if quantization.mode == "nvfp4" else 0)
    else:
        allowed = _affine_bound(packed.scales, packed.biases, quantization.bits)
    return float(mx.where(apart > 0, apart / allowed, 0).max().item())


def _affine_bound(scales: mx.array, biases: mx.array, bits: int) -> mx.array:
    """One step of a group, and what rounding scale and bias to their dtype adds.

    MLX moves the levels so that one is zero; a value at the other end may then be a whole step away, the rest half a
    step (MLX `mlx/ops.cpp`, `affine_quantize`). A hundredth more is for the arithmetic of other devices.
    """
    rounding = _ROUNDING[scales.dtype]
    scales, biases = mx.abs(scales.astype(mx.float32)), mx.abs(biases.astype(mx.float32))
    smallest = _FLOAT16_STEP * 2**bits if rounding == _ROUNDING[mx.float16] else 0
    return 1.01 * (scales * (1 + 2**bits * rounding) + biases * rounding) + smallest
