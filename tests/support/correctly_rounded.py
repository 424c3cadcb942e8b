"""A kernel's results beside float64: they are the exact ones, rounded once to the dtype of the output.

A result may differ from the exact one by half a unit in its last place, and by the error of the float32 arithmetic
before that rounding. One more rounding to 16 bits on the way is larger than that and is detected.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.metal_harness.checking.proof import Report, prove

import mlx.core as mx

# Bits of the significand after the binary point, and the exponent of the smallest normal number.
FORMATS = {mx.float32: (23, -126), mx.float16: (10, -14), mx.bfloat16: (7, -126)}


def double(x: mx.array) -> np.ndarray:
    """The numbers in float64."""
    return np.array(x.astype(mx.float32), np.float64)


def half_ulp(exact: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Half a unit in the last place of each number, if it is rounded to `dtype`."""
    bits, lowest = FORMATS[dtype]
    exponents = np.maximum(np.frexp(exact)[1] - 1, lowest)  # frexp: 0.5 <= fraction < 1
    return np.ldexp(0.5, exponents - bits)


def assert_rounded(outputs: Any, exact: Any, errors: Any) -> None:
    """Assert that each output is within half a unit in the last place, plus its `errors`, of the exact result.

    Args:
        outputs: arrays of MLX.
        exact: for each output, the result in float64.
        errors: for each output, the allowed error of the arithmetic: a number, or one for each result.
    """
    for index, (output, wanted, error) in enumerate(zip(outputs, exact, errors, strict=True)):
        difference = np.abs(double(output) - wanted)
        beyond = (difference - half_ulp(wanted, output.dtype)) / np.broadcast_to(error, wanted.shape)
        assert (beyond <= 1).all(), f"output {index}: {np.nanmax(beyond):.2f} of the allowed error"


def prove_rounded(kernel: Callable, reference: Callable, *args: Any, exact: Any, errors: Any, **options: Any) -> Report:
    """`prove` the kernel beside its reference in MLX, of any error, and `assert_rounded` the outputs."""
    report = prove(kernel, reference, *args, atol=np.inf, **options)
    assert_rounded(report.outputs, exact, errors)
    return report
