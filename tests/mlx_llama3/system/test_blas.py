"""OpenBLAS replaces the wheel's BLAS on Linux, and its absence breaks nothing."""

import os
import subprocess
import sys

import pytest

from mlx_llama3.system import blas

# A product of 1024 x 1024 matrices takes about 0.03 s with OpenBLAS, 1 s with the reference BLAS. The test checks the
# mapped library and the value, not the time.
PROGRAM = """
import mlx_llama3, mlx.core as mx
x = mx.ones((64, 64)) @ (2 * mx.ones((64, 64)))
assert x[3, 5].item() == 128, x
print("libopenblas.so" in open("/proc/self/maps").read())
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs another BLAS")


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | environment, check=True
    )
    return done.stdout.strip()


@linux
def test_loaded_before_mlx():
    assert run(PROGRAM) == "True"


@linux
def test_reference_on_request():
    assert run(PROGRAM, MLX_LLAMA3_BLAS="reference") == "False"


@linux
def test_too_late_once_mlx_is_loaded():
    assert run("import mlx.core\nfrom mlx_llama3.system.blas import use_openblas\nprint(use_openblas())") == "False"


@linux
def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(blas.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    assert blas.use_openblas() is False


@linux
def test_a_library_that_does_not_load_is_logged(tmp_path, monkeypatch, caplog):
    (tmp_path / "cmeel.prefix" / "lib").mkdir(parents=True)
    (tmp_path / "cmeel.prefix" / "lib" / "libopenblas.so").write_bytes(b"not a library")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(blas.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    assert blas.use_openblas() is False
    assert "reference BLAS" in caplog.text


@linux
@pytest.mark.parametrize(
    ("machine", "features", "message"),
    [
        ("x86_64", "flags\t\t: fpu avx2 avx512f avx512cd avx512dq avx512vl", "no avx512bw, which"),
        ("aarch64", "Features\t: fp asimd sve", "no bf16, sve2, which"),
    ],
)
def test_a_processor_that_the_library_is_not_built_for(machine, features, message, tmp_path, monkeypatch, caplog):
    """The library is never opened: the first unsupported instruction would end the process."""
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{features}\n\nprocessor\t: 1\n{features}\n")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(blas, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(blas.platform, "machine", lambda: machine)
    monkeypatch.setattr(blas, "_load", lambda *_: pytest.fail("was opened"))
    assert blas.use_openblas() is False
    assert message in caplog.text


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(blas.sys, "platform", "darwin")
    assert blas.use_openblas() is False
