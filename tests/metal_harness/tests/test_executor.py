"""Threads of a kernel: order, barriers, simdgroups, and what must fail instead of giving an answer."""

import threading

import numpy as np
import pytest

from tests.metal_harness.executor import KernelError, launch
from tests.metal_harness.tests.snippets import dispatch_of, first_line

import mlx.core as mx

ORDERS = ["forward", "reverse", 5]
BARRIER = "threadgroup_barrier(mem_flags::mem_none)"
HEAD = "uint i = thread_position_in_grid.x; uint lane = thread_index_in_simdgroup; "


def kernel(source, x=None, shape=(64,), dtype=mx.float32, **options):
    """A kernel of 64 threads in one threadgroup unless said otherwise; `x` is 0, 1, 2, ..."""
    x = mx.arange(float(np.prod(shape))) if x is None else x
    source = source.replace("BARRIER", BARRIER)
    return dispatch_of(HEAD + source, {"x": x}, {"out": (shape, dtype)}, **options)


def values(source, order="forward", **options):
    return np.array(kernel(source, **options).run(order)[0])


@pytest.mark.parametrize("order", ORDERS)
def test_barrier(order):
    """The threadgroup turns its values round, twice, through the same memory."""
    source = """
        threadgroup float shared[96];
        uint t = thread_index_in_threadgroup;
        shared[t] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float other = shared[95 - t];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        shared[t] = other * 2;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = shared[95 - t] + other;
    """
    x = np.arange(192).reshape(2, 96)
    got = values(source, order, shape=(192,), grid=(192, 1, 1), threadgroup=(96, 1, 1))
    assert np.array_equal(got, (x * 2 + x[:, ::-1]).ravel())


@pytest.mark.parametrize("order", ORDERS)
def test_a_single_shared_variable(order):
    """The optimizer must not take it for a variable of each thread, though each writes it before it reads it."""
    source = """
        threadgroup float total;
        total = 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i == 40) { total = x[i]; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = total;
    """
    assert np.array_equal(values(source, order), np.full(64, 40))


def test_a_missing_barrier_shows_in_another_order():
    source = """
        threadgroup float shared[64];
        shared[i] = x[i];
        out[i] = i == 0 ? 0 : shared[i - 1];
    """
    right = np.concatenate([[0], np.arange(63)])
    assert np.array_equal(values(source), right)  # forward, the neighbour has written already
    assert np.isnan(values(source, "reverse")[1:]).all()


def test_threadgroup_memory_starts_as_nan_in_every_threadgroup():
    source = "threadgroup float shared[2]; out[i] = shared[0]; shared[0] = 1;"
    got = values(source, grid=(64, 1, 1), threadgroup=(32, 1, 1))
    assert np.isnan(got[[0, 32]]).all()
    assert np.array_equal(got[1:32], np.ones(31))


LANES = np.arange(64.0).reshape(2, 32)
OPERATIONS = {
    "simd_sum(x[i])": LANES.sum(1, keepdims=True) + 0 * LANES,
    "simd_product(x[i] == 7 ? 3.0f : 1.0f)": np.array([[3.0], [1.0]]) + 0 * LANES,
    "simd_max(x[i])": LANES.max(1, keepdims=True) + 0 * LANES,
    "simd_min(x[i])": LANES.min(1, keepdims=True) + 0 * LANES,
    "simd_or(uint(i == 3) * 6)": np.array([[6.0], [0.0]]) + 0 * LANES,
    "simd_prefix_inclusive_sum(x[i])": LANES.cumsum(1),
    "simd_prefix_exclusive_sum(x[i])": LANES.cumsum(1) - LANES,
    "simd_prefix_inclusive_product(lane < 3 ? 2.0f : 1.0f)": np.minimum(2 ** (LANES % 32 + 1), 8),
    "simd_broadcast(x[i], 9)": LANES[:, 9:10] + 0 * LANES,
    "simd_broadcast_first(x[i])": LANES[:, :1] + 0 * LANES,
    "simd_shuffle(x[i], 31 - lane)": LANES[:, ::-1],
    "simd_shuffle_xor(x[i], 5)": LANES[:, np.arange(32) ^ 5],
    "simd_shuffle_down(x[i], 30)": LANES[:, [30, 31, *range(2, 32)]],
    "simd_shuffle_up(x[i], 30)": LANES[:, [*range(30), 0, 1]],
    "simd_shuffle_rotate_down(x[i], 3)": np.roll(LANES, -3, 1),
    "simd_shuffle_rotate_up(x[i], 3)": np.roll(LANES, 3, 1),
    "simd_shuffle_and_fill_down(x[i], -x[i], 30)": np.hstack([LANES[:, 30:], -LANES[:, :30]]),
    "simd_shuffle_and_fill_up(x[i], -x[i], 30)": np.hstack([-LANES[:, 2:], LANES[:, :2]]),
    "simd_any(i == 3)": np.array([[1.0], [0.0]]) + 0 * LANES,
    "simd_all(i != 3)": np.array([[0.0], [1.0]]) + 0 * LANES,
    "ulong(simd_ballot(lane % 31 == 0)) >> 30": 2 + 0 * LANES,
    "simd_is_first()": LANES % 32 == 0,
    "quad_sum(x[i])": LANES.reshape(2, 8, 4).sum(2).repeat(4, 1),
    "quad_broadcast(x[i], 2)": LANES // 4 * 4 + 2,
    "quad_shuffle_xor(x[i], 1)": LANES[:, np.arange(32) ^ 1],
    "simd_sum(float4(x[i], 1, 2, 3)).w": 96 + 0 * LANES,
    "simd_sum(half(lane))": 496 + 0 * LANES,
    "float(simd_max(bfloat16_t(lane)))": 31 + 0 * LANES,
    "simd_sum(int(lane) - 16)": -16 + 0 * LANES,
}


@pytest.mark.parametrize("order", ORDERS)
def test_simdgroup_operations(order):
    rows = "\n".join(f"out[{n} * 64 + i] = {operation};" for n, operation in enumerate(OPERATIONS))
    x = mx.arange(64.0)
    got = values(rows, order, x=x, shape=(len(OPERATIONS), 2, 32))
    for operation, row in zip(OPERATIONS, got, strict=True):
        np.testing.assert_array_equal(row, OPERATIONS[operation], err_msg=operation)


@pytest.mark.parametrize("order", ORDERS)
def test_many_operations_in_a_row(order):
    """A lane that is fast must not overwrite what a slow one still reads."""
    source = """
        float value = x[i];
        for (int k = 0; k < 40; k++) {
            value = simd_shuffle_xor(value, 1 + k % 31) + 1;
            simdgroup_barrier(mem_flags::mem_none);
        }
        out[i] = value;
    """
    want = LANES
    for k in range(40):
        want = want[:, np.arange(32) ^ (1 + k % 31)] + 1
    assert np.array_equal(values(source, order).reshape(2, 32), want)


@pytest.mark.parametrize("order", ORDERS)
def test_lanes_that_have_returned_take_no_part(order):
    source = """
        out[i] = -1;
        if (lane % 3 == 0) { return; }
        float sum = simd_sum(x[i]);
        if (lane == 31) { return; }
        out[i] = sum + 1000 * simd_prefix_inclusive_sum(1.0f) + 1e6f * simd_broadcast_first(float(lane));
    """
    lane = np.arange(64) % 32
    stays = lane % 3 != 0
    sums = np.where(np.arange(64) < 32, np.arange(32)[stays[:32]].sum(), np.arange(32, 64)[stays[32:]].sum())
    count = stays.reshape(2, 32).cumsum(1).ravel()
    want = np.where(stays & (lane != 31), sums + 1000 * count + 1e6, -1)
    assert np.array_equal(values(source, order), want)


def test_the_value_of_a_lane_that_takes_no_part_is_nan():
    source = "out[i] = 0; if (lane == 5) { return; } out[i] = simd_shuffle(x[i], 5) + simd_shuffle_xor(x[i], 32);"
    got = values(source)
    assert np.isnan(got[lane := np.arange(64) % 32 != 5]).all()
    assert (got[~lane] == 0).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "if (lane < 16) { out[i] = simd_sum(x[i]); } else { out[i] = simd_max(x[i]); }",
            "simd_sum .*simd_max|simd_max .*simd_sum",
        ),
        ("if (lane < 16) { out[i] = simd_sum(x[i]); }\nelse { out[i] = simd_sum(x[i]); }", "different places"),
        (
            "if (lane < 16) { out[i] = simd_sum(x[i]); } BARRIER;",
            "simd_sum .*threadgroup_barrier|threadgroup_barrier .*simd_sum",
        ),
        (
            "if (lane < 16) { BARRIER; } else {\nBARRIER; }",
            "different places",
        ),
        (
            "if (i < 32) { BARRIER; } else {\nBARRIER; }",
            r"threadgroup 0 wait at different places: thread 0 at .*\(line FIRST\), thread 32 at .*\(line SECOND\)",
        ),
        (
            "if (i == 40) { return; } BARRIER;",
            "not all threads reach: .* thread 40 has returned",
        ),
        (
            "if (i >= 32) { BARRIER; }",
            "not all threads reach: thread 32 waits at line FIRST",
        ),
        (
            "for (uint k = 0; k < i / 32 + 1; k++) { BARRIER; }",
            "not all threads reach",
        ),
    ],
)
def test_what_not_all_threads_reach(source, message, order):
    dispatch = kernel(source)
    first = first_line(dispatch)
    with pytest.raises(KernelError, match=message.replace("FIRST", f"{first}").replace("SECOND", f"{first + 1}")):
        dispatch.run(order)


HELPER = "inline float total(float x) { return simd_sum(x) + 1; } inline void meet() { BARRIER; }"


@pytest.mark.parametrize(
    "source",
    [
        "if (lane < 16) { out[i] = total(x[i]); } else { out[i] = total(-x[i]) * 2; }",
        "if (i < 32) { meet(); out[i] = 1; } else { meet(); out[i] = 2; }",
    ],
)
def test_the_same_line_reached_by_different_calls_is_not_the_same_place(source):
    """Each of the two branches would wait with the threads in it, and take what these have for all there is."""
    header = HELPER.replace("BARRIER", BARRIER)
    with pytest.raises(KernelError, match="reached by different calls"):
        kernel(source, header=header).run()
    both = kernel("out[i] = total(x[i]); meet(); out[i] += total(1);", header=header)
    assert np.array_equal(np.array(both.run()[0]).reshape(2, 32)[:, 0], [496 + 34, 1520 + 34])


def test_the_next_launch_is_as_if_nothing_had_happened():
    broken = kernel("if (i < 3) { out[i] = simd_sum(x[i]); } else { BARRIER; }")
    whole = kernel("out[i] = simd_sum(x[i]);")
    for _ in range(3):
        with pytest.raises(KernelError):
            broken.run()
        assert np.array_equal(np.array(whole.run()[0]).reshape(2, 32)[:, 0], [496, 1520])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("device float* p = out + (ulong(x[0]) << 40); p[i] = 1;", "memory that is no buffer's"),
        ("int zero = int(x[0]) - 64; out[i] = float(int(i) / zero);", "division by zero"),
        ("float deep[40000]; for (int k = 0; k < 40000; k++) { deep[k] = x[i]; } out[i] = deep[int(x[i])];", "stack"),
        (
            "volatile device float4* p = (volatile device float4*)((device char*)out + 4); *p = float4(1);",
            "not aligned",
        ),
    ],
)
def test_a_fault_is_an_exception(source, message):
    with pytest.raises(KernelError, match=f"{message}.*thread 0 of threadgroup"):
        kernel(source, x=mx.full((64,), 64.0)).run()


def test_limits():
    with pytest.raises(KernelError, match="1056 threads a threadgroup, Metal takes at most 1024"):
        kernel("out[i] = 1;", shape=(1056,), grid=(1056, 1, 1), threadgroup=(1056, 1, 1)).run()
    with pytest.raises(KernelError, match="32772 bytes of threadgroup memory, Metal gives 32768"):
        kernel("threadgroup float shared[8193]; shared[i] = x[i]; out[i] = shared[i];").run()


@pytest.mark.parametrize("order", ORDERS)
def test_largest_threadgroup(order):
    source = "threadgroup float s[32]; s[i / 32] = simd_sum(x[i]); threadgroup_barrier(mem_flags::mem_threadgroup); "
    source += "out[i] = simd_sum(s[lane]);"
    got = values(source, order, shape=(1024,), grid=(1024, 1, 1), threadgroup=(1024, 1, 1))
    assert np.array_equal(got, np.full(1024, 1023 * 512))


ATTRIBUTES = {
    "thread_position_in_grid": 3,
    "threads_per_grid": 3,
    "thread_position_in_threadgroup": 3,
    "threads_per_threadgroup": 3,
    "dispatch_threads_per_threadgroup": 3,
    "threadgroup_position_in_grid": 3,
    "threadgroups_per_grid": 3,
    "thread_index_in_threadgroup": 1,
    "thread_index_in_simdgroup": 1,
    "simdgroup_index_in_threadgroup": 1,
    "simdgroups_per_threadgroup": 1,
    "dispatch_simdgroups_per_threadgroup": 1,
    "thread_index_in_quadgroup": 1,
    "threads_per_simdgroup": 1,
}


@pytest.mark.parametrize("order", ORDERS)
def test_attributes_in_a_grid_that_is_no_multiple_of_the_threadgroup(order):
    grid, group = np.array([10, 7, 3]), np.array([4, 5, 2])
    width = sum(ATTRIBUTES.values())
    stores, at = [], 0
    for name, count in ATTRIBUTES.items():
        for axis in "xyz"[:count]:
            stores.append(f"out[base + {at}] = {name}{'.' + axis if count == 3 else ''};")
            at += 1
    source = f"uint3 p = thread_position_in_grid; uint base = ((p.z * 7 + p.y) * 10 + p.x) * {width};\n"
    shape = (3, 7, 10, width)
    source += "\n".join(stores)
    sizes = {"grid": tuple(grid.tolist()), "threadgroup": tuple(group.tolist())}
    got = values(source, order, shape=shape, dtype=mx.uint32, x=mx.zeros(1), **sizes)
    for z, y, x in np.ndindex(3, 7, 10):
        position = np.array([x, y, z])
        number, within = position // group, position % group
        size = np.minimum(group, grid - number * group)
        index = within[0] + size[0] * (within[1] + size[1] * within[2])
        simdgroups = -(-size.prod() // 32)
        want = [position, grid, within, size, group, number, -(-grid // group)]
        want += [[index], [index % 32], [index // 32], [simdgroups], [2], [index % 4], [32]]
        assert got[z, y, x].tolist() == np.concatenate(want).tolist()


def test_the_threadgroup_is_cut_to_the_grid():
    source = "out[i] = threads_per_threadgroup.x + 100 * simd_sum(1.0f);"
    assert np.array_equal(values(source, shape=(9,), grid=(9, 1, 1), threadgroup=(64, 1, 1)), np.full(9, 909))


def test_sizes_and_buffers_that_do_not_fit():
    dispatch = kernel("out[i] = x[i];")
    buffers = dispatch.buffers(dispatch.empty_outputs())
    with pytest.raises(ValueError, match=r"threadgroups of \(0, 1, 1\)"):
        launch(dispatch.kernel, buffers, (64, 1, 1), (0, 1, 1))
    with pytest.raises(ValueError, match="has 2 buffers, got 1"):
        launch(dispatch.kernel, buffers[:1], (64, 1, 1), (64, 1, 1))


def test_an_empty_grid_runs_nothing():
    assert np.isnan(values("out[i] = 1;", grid=(0, 1, 1), threadgroup=(1, 1, 1))).all()


@pytest.mark.parametrize("order", ORDERS)
def test_threadgroups_in_order(order):
    """Each threadgroup takes the next number: all of them run, one after another."""
    source = "uint n = atomic_fetch_add_explicit((device atomic_uint*)out, 1u, memory_order_relaxed); out[n + 1] = i;"
    got = values(source, order, shape=(9,), dtype=mx.uint32, init_value=0, grid=(8, 1, 1), threadgroup=(1, 1, 1))
    turns = {"forward": [*range(8)], "reverse": [*range(7, -1, -1)], 5: [5, 6, 7, 0, 1, 2, 3, 4]}
    assert got.tolist() == [8, *turns[order]]


def test_atomics_on_shared_memory():
    source = """
        threadgroup atomic_int count;
        threadgroup atomic_float most;
        if (i == 0) {
          atomic_store_explicit(&count, 0, memory_order_relaxed);
          atomic_store_explicit(&most, 0.0f, memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&count, 2, memory_order_relaxed);
        float seen = atomic_load_explicit(&most, memory_order_relaxed);
        while (seen < x[i] && !atomic_compare_exchange_weak_explicit(
            &most, &seen, x[i], memory_order_relaxed, memory_order_relaxed)) {}
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = atomic_load_explicit(&count, memory_order_relaxed) + atomic_load_explicit(&most, memory_order_relaxed);
    """
    assert np.array_equal(values(source), np.full(64, 128 + 63))


def test_launches_from_several_threads_of_the_process():
    source = (
        "threadgroup float s[64]; s[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = s[63 - i];"
    )
    runs = [kernel(source, x=mx.arange(64.0) + 64 * n) for n in range(4)]
    buffers = [run.buffers(run.empty_outputs()) for run in runs]
    found = [None] * 4

    def work(n):
        for _ in range(20):
            launch(runs[n].kernel, buffers[n], runs[n].grid, runs[n].threadgroup)
        found[n] = buffers[n][1].tolist()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(np.arange(63, -1, -1) + 64 * n).tolist() for n in range(4)]
