"""The check of a large product: right here, and what it says of products that are not."""

import numpy as np
import pytest

from app.machine import matrix_check
from app.machine.doctor_text import lines
from app.machine.matrix_check import check_matrices

import mlx.core as mx


def test_products_are_right_here():
    checks = check_matrices()
    assert {(check.weights, check.dtype, check.verdict) for check in checks} >= {
        ("dense", "float32", "right"),
        ("4-bit", "float32", "right"),
    }
    assert all(0 < check.error < 1e-5 for check in checks if check.dtype == "float32")


def rounded(x: mx.array, bits: int) -> mx.array:
    """Float32 with so many bits of significand, as TF32 rounds the inputs of a product."""
    significand, exponent = np.frexp(np.array(x))
    return mx.array(np.ldexp(np.round(significand * 2**bits) / 2**bits, exponent).astype(np.float32))


@pytest.mark.parametrize("fault", ["a tile", "a last row", "NaN"])
def test_a_wrong_product_is_found(monkeypatch, fault):
    real = mx.quantized_matmul

    def wrong(*args, **options):
        product = np.array(real(*args, **options))
        if fault == "a tile":
            product[512:544, 64:96] = 0
        elif fault == "a last row":
            product[-1] *= -1
        else:
            product[3, 3] = np.nan
        return mx.array(product)

    monkeypatch.setattr(mx, "quantized_matmul", wrong)
    monkeypatch.setattr(matrix_check, "has_metal", lambda: False)  # float32 alone
    dense, packed = check_matrices()
    assert (dense.verdict, packed.verdict) == ("right", "wrong")


def test_tf32_is_told_from_a_wrong_product(monkeypatch):
    real = mx.quantized_matmul
    monkeypatch.setattr(mx, "quantized_matmul", lambda x, *args, **options: real(rounded(x, 11), *args, **options))
    monkeypatch.setattr(matrix_check, "has_metal", lambda: False)
    _, packed = check_matrices()
    assert packed.verdict == "TF32" and 1e-5 < packed.error < matrix_check.TF32


def test_what_doctor_says(monkeypatch):
    machine = dict.fromkeys(("mlx_lm", "bandwidth", "wheel"), None) | {"metal": True, "memory": 1, "available": 1}
    machine |= dict.fromkeys(("version", "mlx", "system", "python", "chip"), "x")
    report = {"machine": machine, "model": None, "error": None, "kernels": {"asked": "auto"}, "dispatches": []}
    right = {"weights": "dense", "dtype": "float32", "error": 1e-7, "verdict": "right"}
    text = "\n".join(lines(report | {"matrices": [right]}))
    assert "products  of a large matrix are right, compared with float64: dense float32" in text
    names = [{"dtype": dtype} for dtype in ("float32", "float16", "bfloat16")]
    several = [right | name | {"weights": kind} for name in names for kind in ("dense", "4-bit")]
    products = [line for line in lines(report | {"matrices": several}) if "float16" in line]
    assert products[-1] == "          float16, dense bfloat16, 4-bit bfloat16" and len(products[0]) <= 120
    text = "\n".join(lines(report | {"matrices": [right, right | {"verdict": "wrong", "error": 0.03}]}))
    assert "dense float32: WRONG: do not trust any answer" in text and "(relative error 0.03 to float64)" in text
