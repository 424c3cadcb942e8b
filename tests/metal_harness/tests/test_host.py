"""Where the harness cannot run, it can be imported, and says so in one sentence."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.metal_harness.host import unsupported

ROOT = Path(__file__).parents[3]
SENTENCE = "the Metal harness runs on Linux on x86-64 or arm64, and this is darwin on arm64"


def on_a_mac(code: str) -> str:
    """What `code` prints in a process that takes itself for one on a Mac, without the compiler's package."""
    stand_in = "import platform, sys\nsys.platform, platform.machine = 'darwin', lambda: 'arm64'\n"
    stand_in += "sys.modules['ziglang'] = None\n"
    done = subprocess.run([sys.executable, "-c", stand_in + code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("system", "machine", "runs"),
    [
        ("linux", "x86_64", True),
        ("linux", "aarch64", True),
        ("darwin", "arm64", False),
        ("darwin", "x86_64", False),
        ("linux", "riscv64", False),
    ],
)
def test_machines(system, machine, runs):
    assert bool(unsupported(system, machine)) != runs


def test_import_works_and_a_build_says_why_not():
    code = """
from tests.metal_harness import build, mlx_kernels
from tests.metal_harness.checking import mutation, proof
for make in (build.runtime, lambda: build.check_syntax("")):
    try:
        make()
    except build.BuildError as error:
        print(error)
"""
    assert on_a_mac(code).splitlines() == [SENTENCE] * 2


def test_tests_are_left_out():
    code = """
import runpy
for folder in ("tests/metal", "tests/metal_harness/tests"):
    print(runpy.run_path(folder + "/conftest.py")["collect_ignore_glob"])
"""
    assert on_a_mac(code).splitlines() == ["['test_*.py']", "['test_[!h]*.py']"]


def test_the_ledger_leaves_the_bytes_out():
    code = "from benchmarks.ledger_bytes import print_bytes_and_errors; print_bytes_and_errors()"
    assert on_a_mac(code).split("\n") == ["", f"bytes and errors are left out: {SENTENCE}", ""]
