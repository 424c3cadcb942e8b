"""The public API: names that are imported on first use, and packages that stay importable."""

import importlib
import subprocess
import sys

import pytest

import mlx_llama3

NAMES = [
    "Conversation",
    "Sampling",
    "Step",
    "UserError",
    "generate",
    "load",
    "load_draft",
    "load_model",
    "load_tokenizer",
]
PACKAGES = {
    "model": "Transformer",
    "tokenizer": "Tokenizer",
    "generation": "generate",
    "trace": "run",
    "conversation": "Conversation",
    "parallel": "World",
    "checkpoint": "Checkpoint",
}


def test_the_nine_names_and_trace():
    assert sorted(mlx_llama3.__all__) == sorted([*NAMES, "trace"])
    for name in NAMES:
        assert getattr(mlx_llama3, name).__name__ == name
    with pytest.raises(AttributeError, match="'mlx_llama3' has no attribute 'lode'"):
        mlx_llama3.lode


@pytest.mark.parametrize(("package", "name"), PACKAGES.items())
def test_packages_hand_on_their_names(package, name):
    assert callable(getattr(importlib.import_module(f"mlx_llama3.{package}"), name))


def test_importing_the_library_imports_no_mlx():
    script = (
        "import sys, mlx_llama3\n"
        "print('mlx.core' in sys.modules, mlx_llama3.trace.run.__name__, 'mlx.core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False run True\n"
