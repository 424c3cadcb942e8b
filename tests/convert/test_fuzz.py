"""A short run of the fuzzer; `make fuzz` is the long one."""

import pytest
from fuzz_readers import READERS, fuzz


@pytest.mark.parametrize("name", READERS)
def test_short_run(tmp_path, name):
    counts = fuzz(name, 500, 0, tmp_path)
    assert counts["refused"] > 100 and counts.total() == 500
