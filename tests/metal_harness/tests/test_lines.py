import pytest

from tests.metal_harness import build
from tests.metal_harness.checking.checked_build import CHECKED
from tests.metal_harness.checking.lines import find_line, line_table, section_sizes
from tests.metal_harness.tests.snippets import dispatch_of, first_line

import mlx.core as mx


@pytest.fixture(scope="module")
def tested():
    body = "\n".join(
        [
            "y[0] = x[0];",
            "threadgroup float t[3];",
            "",
            *(["((volatile threadgroup float*)t)[0] = x[1];"] * 100),
            "y[1] = t[0];",
        ]
    )
    return dispatch_of(body, {"x": mx.ones((8,))}, {"y": ((2,), mx.float32)}, grid=(1, 1, 1))


def test_every_line_with_an_access_has_an_address(tested):
    name, start = f"{tested.kernel.name}.metal", first_line(tested)
    table = line_table(build.library(tested.kernel, CHECKED))
    found = {line for _, file, line in table if file == name}
    assert {start, start + 103, *range(start + 3, start + 103)} <= found
    assert max(found) <= len(tested.kernel.source.splitlines())


def test_address_between_two_rows_belongs_to_the_first(tested):
    library = build.library(tested.kernel, CHECKED)
    rows = [row for row in line_table(library) if row[2]]
    apart = next(index for index, row in enumerate(rows) if rows[index + 1][0] > row[0] + 1)
    assert find_line(library, rows[apart][0] + 1) == rows[apart][1:]


def test_address_before_all_code(tested):
    assert find_line(build.library(tested.kernel, CHECKED), 0) == ("", 0)


def test_library_without_lines(tested):
    assert line_table(build.library(tested.kernel)) == []
    assert find_line(build.library(tested.kernel), 1 << 20) == ("", 0)


def test_size_of_threadgroup_memory(tested):
    assert section_sizes(build.library(tested.kernel))["threadgroup"] == 12
