import sys
from functools import cache

import numpy as np
import pytest

from tests.metal_harness.checking.proof import compare, prove

import mlx.core as mx

SOURCE = """
uint i = thread_position_in_grid.x;
float own[2];
own[1] = 0;
threadgroup float row[32];
row[i % 32] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
y[i] = T(row[31 - i % 32] * FACTOR);
"""


@cache
def _kernel(source):
    return mx.fast.metal_kernel("mirror", ["x"], ["y"], source)


def mirror(x, source=SOURCE, factor=2):
    (y,) = _kernel(source)(
        inputs=[x],
        template=[("T", x.dtype), ("FACTOR", factor)],
        grid=(x.size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    return y


def reference(x, source=SOURCE, factor=2):
    return x.reshape(-1, 32)[:, ::-1].reshape(x.shape) * factor


X = mx.random.normal((128,), key=mx.random.key(0))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_report(dtype):
    report = prove(mirror, reference, X.astype(dtype), atol=0, reads_once=["x"])
    assert report.error == 0
    assert np.array_equal(report.outputs[0].astype(mx.float32), reference(X.astype(dtype)).astype(mx.float32))
    (proven,) = report.dispatches
    assert proven.traffic["x"].group_read == X.nbytes * dtype.size // 4
    assert proven.checked.threadgroup_bytes == 128
    assert "grid (128, 1, 1), threadgroup (32, 1, 1), 128 bytes of threadgroup memory" in str(report)


def test_kernel_made_before_is_made_anew():
    _kernel(SOURCE)
    assert prove(mirror, reference, X, atol=0).error == 0


# What replaces what in a kernel that is right, and what is said.
BAD = [
    ("31 -", "30 -", "index"),
    ("* FACTOR", "* FACTOR * 1.001f", "of 128 values differ, first at (0,)"),
    ("* FACTOR", "* FACTOR * 1.0", "literal without f"),
    ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race"),
    ("T(row", "T(0 * row", "values differ"),
    ("[i] = T", "[i / 2] = T", "race, write to y"),
    ("T(row", "T(own[0] + row", "is a variable read before it has a value"),
    ("T(row", "T(metal::exp(-INFINITY) + row", "right for finite numbers only: exp(-inf) need not be 0"),
    ("T(row", "T(metal::fast::exp2(own[1] - INFINITY) + row", "right for finite numbers only"),
    ("T(row", "T(1.0f / metal::fast::pow(2.0f, 200.0f) + row", "right for finite numbers only"),
    ("x[i]", "x[i + 1]", "access out of bounds, read of x"),
]


@pytest.mark.parametrize(("old", "new", "said"), BAD)
def test_bad_kernel_is_refused(old, new, said):
    assert old in SOURCE
    with pytest.raises(AssertionError, match=r"(?s).*" + said.replace("(", r"\(").replace(")", r"\)")):
        prove(mirror, reference, X, SOURCE.replace(old, new), atol=1e-6)


def test_precise_functions_and_finite_numbers_pass():
    source = SOURCE.replace("T(row", "T(metal::precise::exp(-INFINITY) + metal::fast::exp2(-3.0e38f) + row")
    assert prove(mirror, reference, X, source, atol=0).error == 0


def test_result_that_depends_on_the_order_of_threads():
    source = """
    uint i = thread_position_in_grid.x;
    int before = atomic_fetch_add_explicit((device atomic<int>*)y, 1, memory_order_relaxed);
    if (i == 5) atomic_store_explicit((device atomic<int>*)y + 1, before, memory_order_relaxed);
    """

    def ticket(x):
        kernel = mx.fast.metal_kernel("ticket", ["x"], ["y"], source)
        call = {"output_shapes": [(2,)], "output_dtypes": [mx.int32], "init_value": 0}
        return kernel(inputs=[x], grid=(64, 1, 1), threadgroup=(64, 1, 1), **call)

    with pytest.raises(AssertionError, match="other values when threads run in another order"):
        prove(ticket, lambda x: mx.array([64, 5]), X, atol=0)


def test_call_without_a_kernel_is_refused():
    with pytest.raises(AssertionError, match="no Metal kernel was called"):
        prove(reference, reference, X, atol=0)


def test_wasteful_kernel_is_refused():
    source = SOURCE.replace("row[i % 32] = x[i]", "row[i % 32] = x[i] + 0 * x[0]")
    with pytest.raises(AssertionError, match="x: threadgroups read 524 bytes in all, the buffer has 512"):
        prove(mirror, reference, X, source, atol=0, reads_once=["x"])


def test_a_copy_that_nobody_asked_for_is_refused():
    x = mx.contiguous(X.reshape(4, 32).T).T
    with pytest.raises(AssertionError, match="mirror: x: 512 bytes are copied before the kernel runs"):
        prove(mirror, reference, x, atol=0)
    report = prove(mirror, reference, x, atol=0, copies=["x"])
    assert report.dispatches[0].traffic["x"].copied == 512


COMPARED = [
    ([mx.ones((2,))], [mx.ones((2,)), mx.ones((2,))], "1 outputs, the reference has 2"),
    ([mx.ones((2,))], [mx.ones((1, 2))], "of the reference"),
    ([mx.ones((2,))], [mx.ones((2,), mx.float16)], "of the reference"),
    ([mx.array([1.0, mx.nan])], [mx.ones((2,))], "output 0: 1 of 2 values differ, first at (1,): nan"),
    ([mx.ones((2,))], [mx.array([1.0, mx.nan])], "output 0: 1 of 2 values differ"),
    ([mx.array([1.0, mx.inf])], [mx.ones((2,))], "output 0: 1 of 2 values differ"),
    ([mx.array([100.0, 1.0])], [mx.array([100.1, 1.2])], "output 0: 1 of 2 values differ, first at (1,)"),
]


@pytest.mark.parametrize(("got", "wanted", "said"), COMPARED)
def test_differences_are_told(got, wanted, said):
    _, (found,) = compare(got, wanted, atol=0.1, rtol=1e-3)
    assert said in found


def test_equal_values_differ_by_nothing():
    special = [mx.array([1.0, mx.nan, mx.inf, -mx.inf]), mx.zeros((0, 3)), mx.array(2.5)]
    assert compare(special, special, atol=0, rtol=0) == (0.0, [])


def test_module_of_the_kernel_holds_the_caches():
    from tests.metal_harness.checking.proof import cached_functions

    assert cached_functions(mirror) == [_kernel]
    assert mirror.__module__ in sys.modules
