"""Quantizes to mxfp4 and nvfp4 on the CPU, with the bits of `mx.quantize` there, at the speed of affine.

`mx.quantize` of a GPU has a kernel for it. That of the CPU compares each value with all 16 of the FP4 grid (E2M1: 0,
0.5, 1, 1.5, 2, 3, 4, 6, and their negatives), and takes the first of the nearest: of two that are equally near the
smaller magnitude, and 0 without a sign. A table of all 16-bit numbers gives the same.
"""

from functools import cache

import numpy as np

import mlx.core as mx

_GROUPS = {"mxfp4": 32, "nvfp4": 16}
_LARGEST = 6.0
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# Beyond it the differences to the grid may be rounded to equal numbers, and their first is not the nearest.
_FAR = 8.0
_TOO_FAR = 0xFF


def quantize(values: mx.array, *, group_size: int, bits: int, mode: str) -> list[mx.array]:
    """As `mx.quantize`: the packed words, uint32, and the scales; for affine modes also the biases.

    Args:
        values: (rows, columns), float16, bfloat16 or float32; columns in whole groups.
        group_size, bits, mode: an MLX format.
    """
    on_cpu = mx.default_device() == mx.cpu
    if on_cpu and group_size == _GROUPS.get(mode) and values.shape[-1] % 32 == 0:
        scaled, scales = _scaled(values, group_size)
        codes = _codes(scaled)
        if codes.max(initial=0) != _TOO_FAR:
            pairs = codes.reshape(-1, 2)
            words = (pairs[:, 0] | (pairs[:, 1] << np.uint8(4))).view("<u4")
            return [mx.array(part).reshape(values.shape[0], -1) for part in (words, scales)]
    return list(mx.quantize(values, group_size=group_size, bits=bits, mode=mode))


def _scaled(values: mx.array, group_size: int) -> tuple[mx.array, mx.array]:
    """The values in units of their group's scale, (groups, group size), and the encoded scales, (groups, 1) uint8."""
    groups = values.reshape(-1, group_size)
    scale = mx.max(mx.abs(groups), axis=-1, keepdims=True) / mx.array(_LARGEST, values.dtype)
    if group_size == _GROUPS["nvfp4"]:  # E4M3
        encoded = mx.to_fp8(scale)
        return groups / mx.from_fp8(encoded, values.dtype), encoded
    # E8M0: the power of two from `scale` on, exactly: a float32 logarithm may round to the one below it.
    mantissa, exponent = np.frexp(np.array(scale.astype(mx.float32)))  # the mantissa is 0, or from 0.5 to below 1
    exponent = mx.array(np.where(mantissa == 0.5, exponent - 1, exponent))
    power = mx.power(mx.array(2.0, values.dtype), exponent.astype(values.dtype))
    return groups / power, (exponent + 127).astype(mx.uint8)


def _codes(scaled: mx.array) -> np.ndarray:
    """The FP4 number of each value, flat uint8; `_TOO_FAR` for a value beyond `_FAR`, and for NaN."""
    if scaled.dtype == mx.float32:
        bits = np.asarray(scaled.view(mx.uint32)).reshape(-1)
        # bfloat16, with its last bit set where bits are cut off: so all stay on their side of the midpoints.
        half = (bits >> 16).astype(np.uint16) | ((bits & 0xFFFF) != 0)
        return _table(mx.bfloat16)[half]
    return _table(scaled.dtype)[np.asarray(scaled.view(mx.uint16)).reshape(-1)]


@cache
def _table(dtype: mx.Dtype) -> np.ndarray:
    """The FP4 number of each number of a 16-bit dtype, by its bits."""
    value = np.array(mx.arange(1 << 16, dtype=mx.uint16).view(dtype).astype(mx.float32))
    size = np.abs(value)
    with np.errstate(invalid="ignore"):  # NaN among the numbers
        code = np.searchsorted(_MIDPOINTS, size, side="left").astype(np.uint8)
    code[(value < 0) & (code > 0)] += 8
    code[~(size <= _FAR)] = _TOO_FAR
    return code
