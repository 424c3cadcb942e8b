"""The stand-in for pytest: `MAC_STAND_IN=compiled python -m pytest -p tests.mac.plugin`.

Test modules see macOS as the project's modules do, so that what they skip there is skipped.
"""

import os
from pathlib import Path
from types import ModuleType

from _pytest.assertion.rewrite import AssertionRewritingHook

from tests.mac.compute import COMPILED
from tests.mac.imports import Finder, is_of_project
from tests.mac.start import VARIABLE, start, started, use_linked_folder

# Not ~/Library/Caches: what was fetched for the tests once is there for these runs too.
os.environ.setdefault("MLX_LLAMA3_CACHE", str(Path.home() / ".cache" / "mlx-llama3"))
# A trial's timings mean nothing in the harness.
os.environ.setdefault("MLX_LLAMA3_KERNELS", "fused")
use_linked_folder()


def _let_tests_see_macos(finder: Finder) -> None:
    """pytest loads test modules by a loader of its own."""
    load = AssertionRewritingHook.exec_module

    def exec_module(self: AssertionRewritingHook, module: ModuleType) -> None:
        if is_of_project(module.__spec__.origin):
            vars(module)["__builtins__"] = finder.builtins
        load(self, module)

    AssertionRewritingHook.exec_module = exec_module


_let_tests_see_macos(started() or start(os.environ.get(VARIABLE) or COMPILED))
