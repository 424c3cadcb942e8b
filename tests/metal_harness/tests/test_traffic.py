import pytest

from tests.metal_harness.checking.checks import check
from tests.metal_harness.checking.traffic import Traffic, ledger, not_read_once
from tests.metal_harness.tests.snippets import dispatch_of

import mlx.core as mx

ROWS, COLUMNS = 8, 64

# One simdgroup a row, two a threadgroup: a matrix times a vector.
MATVEC = """
uint row = thread_position_in_grid.y, lane = thread_position_in_grid.x;
float sum = 0;
for (uint column = lane; column < 64; column += 32) sum += w[row * 64 + column] * x[column];
sum = simd_sum(sum);
if (lane == 0) y[row] = sum;
"""


def matvec(body=MATVEC):
    inputs = {"w": mx.ones((ROWS, COLUMNS)), "x": mx.ones((COLUMNS,))}
    return dispatch_of(body, inputs, {"y": ((ROWS,), mx.float32)}, grid=(32, ROWS, 1), threadgroup=(32, 2, 1))


def traffic(body=MATVEC):
    checked = check(matvec(body))
    assert checked.findings == ()
    return {use.name: use for use in checked.traffic}


def test_matvec_is_counted():
    used = traffic()
    matrix, vector, groups = 4 * ROWS * COLUMNS, 4 * COLUMNS, ROWS // 2
    assert used["w"] == Traffic("w", matrix, read=matrix, unique_read=matrix, group_read=matrix)
    # Each of the two simdgroups of a threadgroup reads the vector.
    assert used["x"] == Traffic(
        "x", vector, read=vector * ROWS, unique_read=vector, group_read=vector * groups, reread=0
    )
    assert used["y"] == Traffic("y", 4 * ROWS, written=4 * ROWS, unique_written=4 * ROWS, group_written=4 * ROWS)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_every_width_of_access_is_counted(size):
    kind = {1: "uchar", 2: "ushort", 4: "uint", 8: "uint2", 16: "uint4"}[size]
    body = f"uint i = thread_position_in_grid.x; ((device {kind}*)y)[i] = ((const device {kind}*)x)[i];"
    tested = dispatch_of(body, {"x": mx.ones((512,))}, {"y": ((64 * size // 4,), mx.float32)})
    x, y = check(tested).traffic
    assert (x.read, x.unique_read, x.reread) == (64 * size, 64 * size, 0)
    assert (y.written, y.unique_written, y.group_written) == (64 * size,) * 3


def test_shape_of_a_strided_input_is_a_buffer_too():
    body = "uint i = thread_position_in_grid.x; y[i] = x[i] * x_shape[0];"
    tested = dispatch_of(body, {"x": mx.ones((64,))}, {"y": ((64,), mx.float32)})
    assert [(use.name, use.unique_read) for use in check(tested).traffic] == [("x", 256), ("x_shape", 4), ("y", 0)]


def test_weights_are_read_once():
    assert not_read_once(list(traffic().values()), ["w"]) == []


WASTEFUL = [
    # every threadgroup reads row 0 as well
    (
        "sum = simd_sum",
        "sum += 0 * w[lane]; sum = simd_sum",
        "w: threadgroups read 2432 bytes in all, the buffer has 2048",
    ),
    # a thread reads its numbers twice, with something between that the compiler cannot look through
    (
        "sum = simd_sum(sum);",
        "sum = simd_sum(sum); for (uint k = lane; k < 64; k += 32) sum += 0 * w[row * 64 + k];",
        "bytes are read twice by one thread",
    ),
    ("column < 64", "column < 63", "w: 2016 of 2048 bytes are read"),
]


@pytest.mark.parametrize(("old", "new", "said"), WASTEFUL)
def test_waste_is_found(old, new, said):
    found = not_read_once(list(traffic(MATVEC.replace(old, new)).values()), ["w"])
    assert any(said in text for text in found), found


def test_vector_is_not_read_once():
    assert not_read_once(list(traffic().values()), ["x"]) == [
        "x: threadgroups read 1024 bytes in all, the buffer has 256"
    ]


def test_unknown_buffer_is_named():
    assert not_read_once(list(traffic().values()), ["weights"]) == [
        "weights: no such buffer; there are ['w', 'x', 'y']"
    ]


def test_two_dispatches_that_share_a_buffer():
    half = Traffic("w", 64, read=32, unique_read=32, group_read=32)
    assert not_read_once([half, half], ["w"]) == []
    assert not_read_once([half], ["w"]) == ["w: 32 of 64 bytes are read"]


def test_ledger_adds_up():
    lines = ledger(traffic().values()).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["w", "2,048", "2,048", "2,048", "2,048", "0", "0", "0"]
    assert lines[-1].split() == ["total", "2,336", "2,304", "3,072", "4,096", "32", "32", "0"]


def test_a_copy_is_in_the_ledger():
    source = "uint i = thread_position_in_grid.x; y[i] = x[i] + z[i];"
    inputs = {"x": mx.ones((8, 8)).T, "z": mx.ones((64,))}
    used = check(dispatch_of(source, inputs, {"y": ((64,), mx.float32)})).traffic
    assert [(use.name, use.copied) for use in used] == [("x", 256), ("z", 0), ("y", 0)]
    assert ledger(used).splitlines()[-1].split()[-1] == "256"
    assert sum(used[1:], used[0]).copied == 256
