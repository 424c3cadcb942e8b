"""Quantized matrices for tests of the fused products, and the products in float64."""

import numpy as np
from correctly_rounded import double

from mlx_llama3.model.layers.packed_linear import PackedLinear

import mlx.core as mx
import mlx.nn as nn

RELATIVE = 2e-7  # error of a float32 dot product, relative to the sum of |w x|; measured 4e-8
NORM = 6e-7  # error of float32's sum of squares and root, relative; measured 2e-7


def quantized_linear(dim, hidden, bits, group, dtype, key):
    linear = nn.Linear(dim, hidden, bias=False)
    linear.weight = mx.random.normal((hidden, dim), scale=dim**-0.5, key=key)
    linear = nn.QuantizedLinear.from_linear(linear, group, bits)
    linear.scales, linear.biases = linear.scales.astype(dtype), linear.biases.astype(dtype)
    return linear


def packed_linear(dim, widths, bits, group, dtype, key):
    """Matrices of `dim` columns and `widths` rows in one `PackedLinear`."""
    keys = mx.random.split(key, len(widths))
    return PackedLinear(
        [quantized_linear(dim, width, bits, group, dtype, each) for width, each in zip(widths, keys, strict=True)]
    )


def dequantized(packed):
    """The matrix `(rows, dim)` in float64."""
    (part,) = packed.parts
    shifts = np.arange(0, 32, part.bits, dtype=np.uint32)
    quants = (np.array(part.weight)[..., None] >> shifts & (2**part.bits - 1)).reshape(len(part.weight), -1)
    scales, biases = (double(each).repeat(part.group_size, axis=1) for each in (part.scales, part.biases))
    return scales * quants + biases


def swiglu64(product, error):
    """SwiGLU of the products with w1 and w3, side by side, and its error from theirs."""
    (gate, up), (gate_error, up_error) = np.split(product, 2, axis=-1), np.split(error, 2, axis=-1)
    silu = gate / (1 + np.exp(-gate))
    slope = 1.1  # the largest of silu
    return silu * up, slope * gate_error * np.abs(up) + np.abs(silu) * up_error + RELATIVE * np.abs(silu * up)


def stream_inputs(dim, dtype, batch, length, scale=1.0):
    """Stream, update and gains for a kernel that adds and norms."""
    keys = mx.random.split(mx.random.key(dim + length), 3)
    x, update = (scale * mx.random.normal((batch, length, dim), key=key) for key in keys[:2])
    return x.astype(dtype), update.astype(dtype), mx.random.normal((dim,), key=keys[2]).astype(dtype)


def normed_product64(x, update, weight, eps, packed):
    """In float64: the new stream, the squared norms, the product with the normed stream, and its error in float32."""
    h = double((x.astype(mx.float32) + update.astype(mx.float32)).astype(x.dtype))  # rounded, as later layers read it
    squares = np.square([double(update), h]).sum(-1)
    inverse_rms = 1 / np.sqrt(squares[1][..., None] / x.shape[-1] + eps)
    matrix, value = dequantized(packed), h * double(weight)
    product = value @ matrix.T * inverse_rms
    error = RELATIVE * np.abs(value) @ np.abs(matrix).T * inverse_rms + NORM * np.abs(product)
    return h, squares, product, error
