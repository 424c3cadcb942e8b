"""`PackedLinear` gives the products of the separate matrices."""

import pytest

from mlx_llama3.model.layers.packed_linear import PackedLinear

import mlx.core as mx
import mlx.nn as nn


def linear(rows: int, seed: int, bits: int | None = None) -> nn.Module:
    """A dense or 4/8-bit module `64 -> rows`."""
    module = nn.Linear(64, rows, bias=False)
    module.weight = mx.random.normal((rows, 64), key=mx.random.key(seed))
    return module if bits is None else nn.QuantizedLinear.from_linear(module, group_size=32, bits=bits)


@pytest.mark.parametrize(
    ("bits", "products"),
    [
        ((None, None, None), 1),
        ((4, 4, 4), 1),
        ((4, 4, 8), 2),  # a recipe that gives wv more bits
        ((4, 8, 4), 3),
        ((None, 4, 4), 2),
    ],
)
def test_equals_separate_products(bits, products):
    x = mx.random.normal((2, 3, 64), key=mx.random.key(9))
    rows = (96, 32, 32)
    separate = [linear(n, i, b)(x) for i, (n, b) in enumerate(zip(rows, bits, strict=True))]
    packed = PackedLinear([linear(n, i, b) for i, (n, b) in enumerate(zip(rows, bits, strict=True))])
    assert len(packed.parts) == products
    outputs = packed(x)
    assert [y.shape for y in outputs] == [(2, 3, n) for n in rows]
    for y, expected in zip(outputs, separate, strict=True):
        assert mx.allclose(y, expected, rtol=0, atol=1e-5).item()


def test_weights_are_stored_once():
    packed = PackedLinear([linear(96, 0), linear(32, 1), linear(32, 2)])
    sizes = [w.size for _, w in nn.utils.tree_flatten(packed.parameters())]
    assert sizes == [(96 + 32 + 32) * 64]
