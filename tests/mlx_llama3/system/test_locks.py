"""Locks between processes: a second one waits or is told, and a process that ends lets go."""

import subprocess
import sys
import time

import pytest

from mlx_llama3.system.locks import exclusive, try_lock

HOLD = """
import sys, time
from pathlib import Path
from mlx_llama3.system.locks import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
    Path(sys.argv[1]).with_name("done").touch()
"""


def holder(path, seconds: float) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_waits(tmp_path):
    other = holder(tmp_path / "lock", 0.3)
    with exclusive(tmp_path / "lock"):
        assert (tmp_path / "done").exists()
    assert other.wait(10) == 0


def test_a_wait_has_an_end(tmp_path):
    other = holder(tmp_path / "lock", 60)
    with pytest.raises(TimeoutError, match="another process holds .*lock"), exclusive(tmp_path / "lock", seconds=0.2):
        pytest.fail("it was locked")
    other.kill()
    other.wait(10)
    with exclusive(tmp_path / "lock", seconds=10):
        assert not (tmp_path / "done").exists()


def test_a_lock_that_is_held_is_told_and_ends_with_its_process(tmp_path):
    other = holder(tmp_path / "lock", 60)
    with open(tmp_path / "lock", "rb") as file:
        assert not try_lock(file)
        other.kill()
        other.wait(10)
        deadline = time.monotonic() + 10
        while not try_lock(file):
            assert time.monotonic() < deadline
            time.sleep(0.01)
