"""The counts of dispatches of small graphs, and of both models."""

from collections import Counter

import pytest

from benchmarks.dispatches import count_dispatches
from benchmarks.ledger import LONG, SHORT, dispatches_per_layer
from benchmarks.ledger_models import WIDTHS, ours, theirs
from mlx_llama3.model.kernels.kernel_set import FUSED, REFERENCE

import mlx.core as mx

DEMO = WIDTHS["demo"]


def test_views_cost_nothing_and_a_concatenation_a_copy_of_each_part():
    def function(x):
        a, b = mx.split(x.reshape(2, 8).T, 2, axis=1)
        return mx.concatenate([a, b, a + b], axis=0)[1:]

    assert count_dispatches(function, mx.zeros(16)) == Counter(Concatenate=3, Add=1)


def test_fast_functions_are_one_dispatch():
    def function(x):
        q = mx.fast.rope(x, 8, traditional=False, base=1e4, scale=1.0, offset=3)
        return mx.fast.rms_norm(mx.fast.scaled_dot_product_attention(q, x, x, scale=1.0), mx.ones(8), 1e-5)

    counts = count_dispatches(function, mx.zeros((1, 2, 4, 8)))
    assert counts["rope"] == counts["attention"] == counts["rms_norm"] == 1
    assert count_dispatches(function, mx.zeros((1, 2, 1024, 8)))["attention_join"] == 1


def test_compiled_chains_are_one():
    def function(x):
        gate = x @ x
        return gate * mx.sigmoid(gate) * x

    assert count_dispatches(function, mx.zeros((4, 4))) == Counter(Matmul=1, Sigmoid=1, Multiply=2)
    assert count_dispatches(function, mx.zeros((4, 4)), compiled=True) == Counter(Matmul=1, Multiply=1)


@pytest.mark.parametrize(("used", "expected"), [(SHORT, 6), (LONG, 7)])
def test_a_fused_layer_with_live_norms(used, expected):
    assert dispatches_per_layer(lambda n: ours(DEMO, n, FUSED), used, norms=True).total() == expected


def test_a_layer_of_references():
    """Two norms, four products, rotation, two copies that concatenate keys and values, cache write, attention, two
    adds, three operations of SwiGLU, or one if it is compiled."""
    assert dispatches_per_layer(lambda n: ours(DEMO, n, REFERENCE), SHORT).total() == 16
    assert dispatches_per_layer(lambda n: ours(DEMO, n, REFERENCE), SHORT, compiled=True).total() == 14


@pytest.mark.parametrize(("used", "expected"), [(SHORT, 17), (LONG, 18)])
def test_a_layer_of_mlx_lm(used, expected):
    pytest.importorskip("mlx_lm")
    assert dispatches_per_layer(lambda n: theirs(DEMO, n), used, compiled=True).total() == expected
