"""Each type with each cache, by the references and by the fused kernels, against the CPU's float32."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.mac.compute import COMPILED, KERNELS, MODES
from tests.mac.tests.conftest import PROGRAMS, ROOT, on_a_mac

# The name in Metal, and the tolerance: with 16 bits, a number that is rounded otherwise may be quantized otherwise.
TYPES = {"float16": ("float16_t", 3e-2), "bfloat16": ("bfloat16_t", 12e-2), "float32": ("float", 1e-4)}
CACHES = ("plain", "8 bits", "4 bits", "rotating")


@pytest.fixture(scope="module")
def expected(folder_of, tmp_path_factory) -> dict[str, np.ndarray]:
    """The logits of the float32 folder in a process without the stand-in, with the CPU's forms, by cache."""
    out = tmp_path_factory.mktemp("cpu") / "logits.safetensors"
    command = [sys.executable, PROGRAMS / "matrix_program.py", out, folder_of("float32")]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}, check=True, capture_output=True)
    return {key.split("|")[1]: rows for key, rows in load_file(out).items()}


@pytest.fixture(scope="module", params=MODES)
def on_mac(request, folder_of, tmp_path_factory) -> tuple[str, dict[str, np.ndarray], dict[str, list[str]]]:
    """The mode, the logits, and the kernels that ran."""
    out = tmp_path_factory.mktemp("mac") / "logits.safetensors"
    folders: list[Path] = [folder_of(dtype) for dtype in TYPES]
    done = on_a_mac(request.param, PROGRAMS / "matrix_program.py", out, *folders)
    assert done.returncode == 0, done.stderr
    return request.param, load_file(out), json.loads(done.stdout)


def difference(ours: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest logit."""
    return np.abs(ours - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("kernels", ["references", "fused"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", TYPES)
def test_logits(on_mac, expected, dtype, cache, kernels):
    _, logits, _ = on_mac
    tolerance = TYPES[dtype][1]
    ours = logits[f"{dtype}|{cache}|{kernels}"]
    assert difference(ours, expected[cache]) < tolerance
    assert difference(ours[1:], expected[cache][:-1]) > 2 * tolerance  # the logits of the neighbouring positions


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", TYPES)
def test_kernels_that_ran(on_mac, dtype, cache):
    mode, _, ran = on_mac
    assert ran[f"{dtype}|{cache}|references"] == []
    names = ran[f"{dtype}|{cache}|fused"]
    assert names and all(name.startswith("llama3_") and f"_{TYPES[dtype][0]}_" in name for name in names)
    assert any("sdpa_quantized" in name for name in names) == ("bits" in cache)
    # Decoding is compiled: the kernels around attention run in the other mode.
    assert any("swiglu_qmv" in name for name in names) == (mode == KERNELS)
    assert mode in (COMPILED, KERNELS)
