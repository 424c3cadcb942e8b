"""Changes modules when they are imported: MLX gets its GPU, the project's own modules see macOS.

A module looks names up in its globals and then in the builtins that it was given, and `import` is one of these. So the
project's modules get builtins whose `import` hands out `macos.views()`, at their head and within functions alike.
"""

import builtins
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.mac import compute, macos
from tests.mac.gpu import Gpu

ROOT = Path(__file__).parents[2]
_PROJECT = ("app/", "convert/", "mlx_llama3/", "benchmarks/", "tests/", "mlx_llama3_main.py")
# These see the system as it is: the stand-in itself, and what makes MLX's CPU backend fast.
_NOT_PROJECT = ("tests/mac/", "tests/metal_harness/", "mlx_llama3/system/blas.py")
_KERNELS = "mlx_llama3.model.kernels."


class Builtins(dict):
    """The builtins of the project's modules; all but `import` and `open` are looked up where tests may replace them."""

    def __missing__(self, name: str) -> Any:
        try:
            return vars(builtins)[name]
        except KeyError:
            raise NameError(f"name {name!r} is not defined", name=name) from None


def project_builtins() -> Builtins:
    views, real = macos.views(), builtins.__import__

    def view_import(name: str, namespace: Any = None, local: Any = None, names: Any = (), level: int = 0) -> ModuleType:
        module = real(name, namespace, local, names, level)
        return views.get(module.__name__, module)

    return Builtins(__import__=view_import, open=macos.opened)


def is_of_project(path: str | None) -> bool:
    """Whether a module's file is one of the project's own, to which macOS is shown."""
    if path is None or not Path(path).is_relative_to(ROOT):
        return False
    inside = Path(path).relative_to(ROOT).as_posix()
    return inside.startswith(_PROJECT) and not inside.startswith(_NOT_PROJECT)


class Finder(MetaPathFinder):
    """Finds modules as the other finders do, and wraps the loaders of those that are changed."""

    def __init__(self, mode: str) -> None:
        self.builtins = project_builtins()
        self._after = {"mlx.core": lambda module: (Gpu(module).install(), compute.install(module, mode))}

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            if (spec := finder.find_spec(name, path, target)) is not None:
                return self._changed(spec)
        return None

    def _changed(self, spec: ModuleSpec) -> ModuleSpec | None:
        ours = is_of_project(spec.origin)
        after = _with_reference if ours and spec.name.startswith(_KERNELS) else self._after.get(spec.name)
        if spec.loader is not None and (ours or after):
            spec.loader = _Changing(spec.loader, self.builtins if ours else None, after)
        return spec


class _Changing(Loader):
    """A loader that gives a module other builtins before it runs, and changes it after."""

    def __init__(self, loader: Any, given: Builtins | None, after: Callable[[ModuleType], Any] | None) -> None:
        self._loader, self._given, self._after = loader, given, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._given is not None:
            vars(module)["__builtins__"] = self._given
        self._loader.exec_module(module)
        if self._after is not None:
            self._after(module)


def _with_reference(module: ModuleType) -> None:
    """Within `mx.compile` a fused kernel's reference takes its place."""
    if hasattr(module, "fused"):
        module.fused = compute.unless_traced(module.fused, module.reference)
