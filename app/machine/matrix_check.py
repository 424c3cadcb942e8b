"""Checks that MLX multiplies one large matrix correctly here, dense and quantized, against float64.

Apple's compilers have produced wrong products in large shapes only (mlx issue 3586: a test of 64 rows missed what 1024
x 2048 showed), so a small self-test is not enough.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_llama3.autotune.choice import has_metal

import mlx.core as mx

ROWS, INNER, COLUMNS = 1024, 2048, 512
# Allowed root mean square error relative to the product. Packed weights may be rounded to the dtype before the product,
# in one of two ways, which differ by 6e-4 in float16 and 5e-3 in bfloat16: about three times that is allowed. A wrong
# tile of 32 x 32 makes an error of 4e-2. TF32 rounds the inputs to 11 bits, as float16 has.
ALLOWED = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
TF32 = 2e-3
BITS, GROUP_SIZE = 4, 64


@dataclass(frozen=True)
class MatrixCheck:
    """One product: "dense" or "4-bit" weights, the dtype, its relative RMS error, and a verdict.

    verdict: "right", "wrong", or "TF32" for a float32 product that is as inexact as TF32 is.
    """

    weights: str
    dtype: str
    error: float
    verdict: str


def check_matrices() -> list[MatrixCheck]:
    """Multiply `(1024, 2048)` by `(2048, 512)` in each dtype that models run in here; 16-bit types only on a GPU."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, INNER), np.float32)
    weight = rng.standard_normal((COLUMNS, INNER), np.float32) / INNER**0.5
    dtypes = (mx.float32, mx.float16, mx.bfloat16) if has_metal() else (mx.float32,)
    return [check for dtype in dtypes for check in _check(mx.array(x).astype(dtype), mx.array(weight).astype(dtype))]


def _check(x: mx.array, weight: mx.array) -> list[MatrixCheck]:
    packed = mx.quantize(weight, GROUP_SIZE, BITS)
    restored = mx.dequantize(*packed, GROUP_SIZE, BITS)
    quantized = mx.quantized_matmul(x, *packed, transpose=True, group_size=GROUP_SIZE, bits=BITS)
    return [
        _verdict("dense", x @ weight.T, x, weight),
        _verdict(f"{BITS}-bit", quantized, x, restored),
    ]


def _verdict(kind: str, product: mx.array, x: mx.array, weight: mx.array) -> MatrixCheck:
    exact = _float64(x) @ _float64(weight).T
    error = float(np.sqrt(np.mean((_float64(product) - exact) ** 2) / np.mean(exact**2)))
    dtype = str(product.dtype).removeprefix("mlx.core.")
    if error <= ALLOWED[dtype]:  # NaN is not
        return MatrixCheck(kind, dtype, error, "right")
    is_tf32 = dtype == "float32" and error <= TF32
    return MatrixCheck(kind, dtype, error, "TF32" if is_tf32 else "wrong")


def _float64(array: mx.array) -> Any:
    return np.array(array.astype(mx.float32)).astype(np.float64)
