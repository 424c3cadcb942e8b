"""Starts the stand-in in this process, and in those that it starts."""

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.mac import lines, macos
from tests.mac.compute import KERNELS, MODES
from tests.mac.imports import ROOT, Finder

VARIABLE = "MAC_STAND_IN"
HOOK = str(Path(__file__).parent / "hook")


def start(mode: str) -> Finder:
    """From now on this process is one on a Mac. Returns the finder that imports its modules.

    mode: one of `compute.MODES`.

    Raises:
        ValueError: another mode.
        RuntimeError: MLX or a module of the project is loaded already.
    """
    if mode not in MODES:
        raise ValueError(f"{VARIABLE} is {mode!r}; it must be one of {', '.join(MODES)}")
    if early := [name for name in ("mlx.core", "mlx_llama3", "app", "convert") if name in sys.modules]:
        raise RuntimeError(f"the stand-in starts before {early[0]} is loaded")
    finder = Finder(mode)
    sys.meta_path.insert(0, finder)
    macos.hide_paths(lambda namespace: namespace.get("__builtins__") is finder.builtins)
    socket.socket.setsockopt = macos.setsockopt
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # the harness, which the first kernel loads
    os.environ[VARIABLE] = mode
    if mode == KERNELS:
        os.environ["MLX_DISABLE_COMPILE"] = "1"
    os.environ.update(_handed_on(os.environ))
    _hand_on_in_other_environments()
    if folder := os.environ.get(lines.VARIABLE):
        lines.record(Path(folder))
    return finder


def started() -> Finder | None:
    """The finder of this process, if the stand-in was started in it."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Finder)), None)


def use_linked_folder() -> None:
    """Put temporary files behind a symbolic link, as macOS does: /var is a link to /private/var there.

    Does nothing in a process that has such a folder from the one that started it.
    """
    if os.path.realpath(tempfile.gettempdir()).endswith("/private/var/folders"):
        return
    base = Path(tempfile.mkdtemp(prefix="mac-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    (base / "private" / "var" / "folders").mkdir(parents=True)
    (base / "var").symlink_to(base / "private" / "var")
    os.environ["TMPDIR"] = tempfile.tempdir = str(base / "var" / "folders")


def _handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the hook in front of `PYTHONPATH`, by which a new Python starts the stand-in."""
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", HOOK)]
    return {**environment, "PYTHONPATH": os.pathsep.join([HOOK, *paths])}


def _hand_on_in_other_environments() -> None:
    """A program that a test starts in an environment of its own gets the hook too, if it gets the variable."""
    popen, execvpe = subprocess.Popen.__init__, os.execvpe

    def start_program(self: subprocess.Popen, *args: Any, env: Mapping[str, str] | None = None, **options: Any) -> None:
        popen(self, *args, env=_handed_on(env) if env is not None and VARIABLE in env else env, **options)

    def execute(file: str, args: Any, env: Mapping[str, str]) -> Any:
        return execvpe(file, args, _handed_on(env) if VARIABLE in env else env)

    subprocess.Popen.__init__, os.execvpe = start_program, execute
