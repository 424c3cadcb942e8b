import numpy as np
import pytest

from tests.metal_harness.checking.checked_build import CHECKED
from tests.metal_harness.checking.checks import check
from tests.metal_harness.tests.snippets import dispatch_of, first_line

import mlx.core as mx

# Two simdgroups: each adds up its numbers, then thread 0 the two sums.
GOOD = """
uint i = thread_position_in_threadgroup.x;
threadgroup float sums[2];
float sum = simd_sum(x[i]);
if (thread_index_in_simdgroup == 0) sums[simdgroup_index_in_threadgroup] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (i == 0) y[threadgroup_position_in_grid.x] = sums[0] + sums[1];
"""


def dispatch(body, size=1, **options):
    return dispatch_of(body, {"x": mx.arange(64, dtype=mx.float32)}, {"y": ((size,), mx.float32)}, **options)


def changed(old, new):
    assert old in GOOD
    return GOOD.replace(old, new)


def findings(body, size=1, **options):
    return check(dispatch(body, size, **options)).findings


@pytest.mark.parametrize("order", ["forward", "reverse", 1])
def test_good_kernel_has_no_findings(order):
    assert check(dispatch(GOOD), order).findings == ()


def test_outputs_are_computed_and_launches_repeat():
    tested = dispatch(GOOD)
    first, second = check(tested), check(tested)
    assert first == second
    assert first.threadgroup_bytes == 8


def test_launch_with_fewer_buffers_after_one_with_more():
    names = "abcdefgh"
    body = "uint i = thread_position_in_grid.x; y[i] = " + " + ".join(f"{name}[i]" for name in names) + ";"
    many = dispatch_of(body, {name: mx.ones((64,)) for name in names}, {"y": ((64,), mx.float32)})
    assert check(many).findings == ()
    assert check(dispatch(GOOD)).findings == ()


# What replaces what, the line of the body that is named, and what is said.
BAD = [
    ("x[i]", "x[i + 1]", 3, "access out of bounds, read of x at byte 256 of 256, thread 63"),
    ("x[i]", "x[int(i) - 1]", 3, "access out of bounds, read of x at byte -4 of 256, thread 0"),
    ("y[thread", "y[1 + thread", 6, "access out of bounds, write to y at byte 4 of 4"),
    ("+ sums[1]", "+ sums[2 + i]", 6, "index out of range"),
    ("+ sums[1]", "+ ((threadgroup float*)sums)[2 + i]", 6, "access out of bounds, read of sums at byte 8 of 8"),
    ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", 4, "race, write to sums at byte 4 of 8, thread 32"),
    ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", 6, "read of what nobody wrote, read of sums at byte 4"),
    ("mem_flags::mem_threadgroup", "mem_flags::mem_device", 6, "race, read of sums at byte 4 of 8, thread 0"),
    ("mem_flags::mem_threadgroup", "mem_flags::mem_none", 6, "race, read of sums at byte 4 of 8, thread 0"),
    ("threadgroup_barrier", "simdgroup_barrier", 6, "read of what nobody wrote, read of sums at byte 4"),
    ("threadgroup_barrier", "if (i < 32) threadgroup_barrier", 5, "a barrier that not all threads reach"),
    ("if (i == 0) y", "y", 6, "race, write to y at byte 0 of 4, thread 1 of threadgroup 0; write by thread 0"),
    (
        "if (i == 0) y",
        "if (i == 0) y[0] = 0; threadgroup_barrier(mem_flags::mem_device); if (i == 1) y",
        6,
        "written twice",
    ),
    ("sums[0] +", "y[0] +", 6, "read of what nobody wrote, read of y"),
    ("if (i == 0) y", "if (i == 0) ((device float*)x)[0] = 1; if (i == 0) y", 6, "write to an input, write to x"),
    ("sums[0] +", "float(1u << (32 + i)) +", 6, "shift by more than the bits"),
    ("sums[0] +", "float(1ul << (64 + i)) +", 6, "shift by more than the bits"),
    ("sums[0] +", "(*(const device float4*)(x + 1)).x +", 6, "misaligned access"),
    ("sums[0] +", "float(*(const device ulong*)(x + 1)) +", 6, "misaligned access"),
    ("sums[0] +", "float(3 / int(i)) +", 6, "division by zero"),
    ("sums[0] +", "float(int(sums[0] * 1e20f)) +", 6, "float outside of the integer type's range"),
    ("sums[0] +", "float(2147483647 + int(sums[0])) +", 6, "signed integer overflow"),
    ("float sum =", "float own[3] = {0, 0, 0}; float sum = own[i] +", 3, "index out of range"),
]


@pytest.mark.parametrize(("old", "new", "line", "said"), BAD)
def test_bad_kernel_is_found(old, new, line, said):
    tested = dispatch(changed(old, new))
    line += first_line(tested)
    found = check(tested).findings
    assert any(said in text and f"line {line}" in text for text in found), found


def test_overrun_into_the_next_array_is_found():
    body = "threadgroup float a[4], b[4]; uint i = thread_position_in_grid.x; a[i % 4] = 1; b[i % 4] = 1;" + (
        "threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = ((threadgroup float*)a)[x[i] > 62 ? 4 : i % 4];"
    )
    body = body.replace("a[i % 4] = 1; b[i % 4] = 1;", "if (i < 4) { a[i] = 1; b[i] = 1; }")
    assert any("access out of bounds, read of a at byte 16 of 16, thread 63" in text for text in findings(body, 64))


def test_overrun_of_a_constant_is_found():
    header = "constant float table[3] = {1.0f, 2.0f, 3.0f};\n"
    body = "uint i = thread_position_in_grid.x; const constant float* p = table; y[i] = p[i % COUNT];"
    good, bad = (dispatch(body.replace("COUNT", count), 64, header=header) for count in "34")
    assert check(good).findings == ()
    assert any("access out of bounds, read of table at byte 12 of 12" in text for text in check(bad).findings)


@pytest.mark.parametrize("distance", [64, 100, 1000, 20000, -1000])
def test_no_overrun_ends_in_another_buffer(distance):
    body = f"uint i = thread_position_in_grid.x; y[i] = a[i] + b[i]; z[int(i) + {distance}] = 1;"
    inputs = {name: mx.ones((64,)) for name in "ab"}
    tested = dispatch_of(body, inputs, dict.fromkeys("yz", ((64,), mx.float32)))
    assert any(f"write to z at byte {4 * distance} of 256" in text for text in check(tested).findings)


def test_strided_input():
    """Not copied for the kernel: rows lie 64 numbers apart, and what lies between them belongs to the buffer."""
    body = "uint i = thread_position_in_grid.x; y[i] = x[i % 4 * x_strides[0] + i / 4 * x_strides[1]];"
    x = mx.arange(256, dtype=mx.float32).reshape(4, 64)
    tested = dispatch_of(body, {"x": x[:, :16]}, {"y": ((64,), mx.float32)}, row_contiguous=False)
    checked = check(tested)
    assert checked.findings == ()
    assert checked.traffic[0].size == 4 * (3 * 64 + 16)
    assert np.array_equal(np.array(tested.run()[0]), np.array(x[:, :16]).T.reshape(-1))


def test_output_that_is_not_written_completely():
    assert findings(GOOD, size=3) == ("output y: 8 of 12 bytes are never written",)


def test_uninitialized_private_array_is_not_a_number():
    """Nothing tells of it but the value."""
    tested = dispatch("float own[4]; y[0] = own[thread_position_in_grid.x];", grid=(1, 1, 1), threadgroup=(1, 1, 1))
    (value,) = np.array(tested.run(mode=CHECKED)[0])
    assert np.isnan(value)


@pytest.mark.parametrize("threads", [(1025, 1, 1), (32, 33, 1)])
def test_too_many_threads(threads):
    body = "y[thread_index_in_threadgroup] = 1;"
    found = findings(body, 1056, grid=threads, threadgroup=threads)
    assert f"{threads[0] * threads[1]} threads a threadgroup, Metal takes at most 1024" in found


@pytest.mark.parametrize(("count", "fits"), [(8192, True), (8193, False)])
def test_threadgroup_memory_is_measured(count, fits):
    body = f"threadgroup float many[{count}]; many[thread_position_in_grid.x] = 1; y[thread_position_in_grid.x] = 1;"
    checked = check(dispatch(body, 64))
    assert checked.threadgroup_bytes == 4 * count
    assert (checked.findings == ()) == fits
    assert fits or "32772 bytes of threadgroup memory, Metal takes at most 32768" in checked.findings


# ---- races: who is ordered with whom

TURN = "uint i = thread_position_in_grid.x; threadgroup float t[64]; t[i] = x[i]; {barrier} y[i] = t[{next}];"
SIMDGROUP, THREADGROUP = "simdgroup_barrier", "threadgroup_barrier"


@pytest.mark.parametrize(
    ("next_thread", "barrier", "is_race"),
    [
        ("i", "", False),
        ("(i + 1) % 32 + i / 32 * 32", f"{SIMDGROUP}(mem_flags::mem_threadgroup);", False),
        ("(i + 1) % 32 + i / 32 * 32", f"{SIMDGROUP}(mem_flags::mem_none);", True),
        ("(i + 1) % 64", f"{SIMDGROUP}(mem_flags::mem_threadgroup);", True),
        ("(i + 1) % 64", f"{THREADGROUP}(mem_flags::mem_threadgroup);", False),
        ("(i + 1) % 64", f"{THREADGROUP}(mem_flags::mem_device);", True),
        # A simdgroup operation makes lanes wait, and orders no memory.
        ("(i + 1) % 32 + i / 32 * 32", "float unused = simd_sum(x[i]); t[i] += 0 * unused;", True),
    ],
)
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_what_orders_threadgroup_memory(next_thread, barrier, is_race, order):
    body = TURN.format(next=next_thread, barrier=barrier)
    found = check(dispatch(body, 64), order).findings
    assert any("race" in text for text in found) == is_race, found


@pytest.mark.parametrize(("flags", "is_race"), [("mem_device", False), ("mem_threadgroup", True)])
def test_device_memory_is_ordered_by_its_own_flag(flags, is_race):
    body = f"""uint i = thread_position_in_grid.x; y[i] = x[i];
    threadgroup_barrier(mem_flags::{flags});
    float other = y[(i + 1) % 64];
    threadgroup_barrier(mem_flags::{flags});
    if (other < 0) y[i] = 0;"""
    assert any("race" in text for text in findings(body, 64)) == is_race


def test_threadgroups_are_not_ordered():
    """Each threadgroup runs to its end before the next here, but not on a GPU."""
    body = "uint i = thread_position_in_grid.x; y[i] = 1 + (i == 32 ? y[0] : 0);"
    (found,) = findings(body, 64, threadgroup=(32, 1, 1))
    assert "race, read of y at byte 0 of 256, thread 0 of threadgroup 1; write by thread 0 of threadgroup 0" in found


def test_write_after_a_read_of_another_simdgroup():
    """Readers of several simdgroups are remembered, not the last one alone."""
    body = """uint i = thread_position_in_grid.x; threadgroup float t[1];
    if (i == 32) t[0] = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float seen = t[0];
    if (i == 32) t[0] = 2;
    y[i] = seen;"""
    for order in ("forward", "reverse"):
        assert any("race" in text for text in check(dispatch(body, 64), order).findings), order


def test_atomics_do_not_race_and_may_meet():
    body = "atomic_fetch_add_explicit((device atomic<int>*)y, 1, memory_order_relaxed);"
    inputs, outputs = {"x": mx.zeros((64,))}, {"y": ((1,), mx.int32)}
    good = dispatch_of(body, inputs, outputs, init_value=0, threadgroup=(32, 1, 1))
    assert check(good).findings == ()
    mixed = dispatch_of(body + "y[0] = 3;", inputs, outputs, init_value=0)
    assert any("race" in text for text in check(mixed).findings)


def test_more_places_than_can_be_kept_do_no_harm():
    body = "uint i = thread_position_in_grid.x;" + "".join(f"\nif (i == 0) y[0] = {n};" for n in range(200))
    body = body.replace("y[0] = ", "((volatile device float*)y)[0] = ")
    assert all("written twice" in text for text in findings(body))
