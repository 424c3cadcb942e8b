"""The door of the program: what the command `mlx-llama3` and `python -m mlx_llama3` start.

The program's folders are called `app` and `convert`, as many people's own files are. A person's `app.py` that comes
first on the path must not stand in for them, so they are looked for beside this file before anywhere else.

    python -m mlx_llama3_main MODULE [ARGUMENT ...]

runs one module of the program, for the processes that it starts itself. This module lies outside of `mlx_llama3`, whose
import loads a BLAS, which `--help` does not need.
"""

import runpy
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDERS = ("app", "convert", "mlx_llama3")


class OwnFolders(MetaPathFinder):
    """Finds the program's packages beside this file."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The package `name`, if it is one of the program's."""
        if name not in FOLDERS:
            return None
        folder = HERE / name
        return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])


def main() -> int:
    """Run the command line; returns the exit code."""
    sys.meta_path.insert(0, OwnFolders())
    from app.cli import main as run

    return run()


if __name__ == "__main__":
    sys.meta_path.insert(0, OwnFolders())
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
