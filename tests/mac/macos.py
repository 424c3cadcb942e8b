"""macOS for the project's own modules: what `sys`, `os`, `platform` and `socket` say there, and the paths it lacks.

Other packages see the system as it is, since macOS's own functions are not here for them to call.
"""

import os
import pathlib
import platform
import socket
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.mac.gpu import FACTS

VERSION = "15.5"
PAGE = 16384  # bytes, of Apple silicon
MISSING_PATHS = ("/proc", "/dev/full")
# `<netinet/tcp.h>`: the longest time that sent data stays unanswered, in seconds. Linux has it in milliseconds.
_TCP_RXT_CONNDROPTIME = 0x80


class View(ModuleType):
    """A module as macOS has it: `changes` in place of its own names, without those of `missing`.

    What a test sets on it is set on the module itself, except for these names.
    """

    def __init__(self, module: ModuleType, changes: dict[str, Any], missing: tuple[str, ...] = ()) -> None:
        super().__init__(module.__name__, module.__doc__)
        own = {"_module": module, "_changes": changes, "_names": {*changes, *missing}}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        changes, names = own["_changes"], own["_names"]
        if name == "__dict__":
            seen = {key: value for key, value in vars(own["_module"]).items() if key not in names}
            return seen | changes
        if name in changes:
            return changes[name]
        if name in names:
            raise AttributeError(f"module {own['_module'].__name__!r} has no attribute {name!r} on macOS")
        return object.__getattribute__(self, name) if name in _OF_VIEW else getattr(own["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = object.__getattribute__(self, "__dict__")
        if name in own["_names"]:
            own["_changes"][name] = value
        else:
            setattr(own["_module"], name, value)

    def __delattr__(self, name: str) -> None:
        own = object.__getattribute__(self, "__dict__")
        if name in own["_names"]:
            del own["_changes"][name]
        else:
            delattr(own["_module"], name)


_OF_VIEW = ("__class__", "__setattr__", "__delattr__", "__getattribute__")


def setsockopt(self: socket.socket, level: int, option: int, *value: Any) -> None:
    """As `socket.socket.setsockopt`; takes macOS's option for unanswered data too."""
    if (level, option) == (socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME):
        option, value = socket.TCP_USER_TIMEOUT, (1000 * value[0],)
    super(socket.socket, self).setsockopt(level, option, *value)


def views() -> dict[str, ModuleType]:
    """The modules that are another on macOS, by name."""
    sockets = {"TCP_KEEPALIVE": socket.TCP_KEEPIDLE}
    return {
        "sys": View(sys, {"platform": "darwin"}),
        "os": View(os, {"uname": _uname, "sysconf": _sysconf}, ("sched_getaffinity", "sched_setaffinity")),
        "platform": View(
            platform,
            {
                "machine": lambda: "arm64",
                "system": lambda: "Darwin",
                "release": lambda: "24.5.0",
                "mac_ver": lambda *_: (VERSION, ("", "", ""), "arm64"),
            },
        ),
        "socket": View(socket, sockets, ("TCP_KEEPIDLE", "TCP_USER_TIMEOUT")),
    }


def hide_paths(is_of_project: Callable[[dict], bool]) -> None:
    """Let `pathlib` find none of `MISSING_PATHS` for the project's own code.

    is_of_project: whether these globals are of a module of the project.
    """
    for name in ("stat", "open", "exists", "is_file", "is_dir"):
        setattr(pathlib.Path, name, _hiding(getattr(pathlib.Path, name), is_of_project))


def opened(file: Any, *args: Any, **options: Any) -> Any:
    """`open` for the project's own code."""
    if _is_missing(file):
        raise FileNotFoundError(2, "No such file or directory", os.fspath(file))
    return open(file, *args, **options)


def _hiding(method: Callable, is_of_project: Callable[[dict], bool]) -> Callable:
    def call(path: pathlib.Path, *args: Any, **options: Any) -> Any:
        if _is_missing(path) and is_of_project(_caller()):
            if method.__name__ in ("stat", "open"):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return False
        return method(path, *args, **options)

    return call


def _is_missing(path: Any) -> bool:
    return isinstance(path, str | os.PathLike) and any(
        (text := os.fspath(path)) == missing or str(text).startswith(f"{missing}/") for missing in MISSING_PATHS
    )


def _caller() -> dict:
    """The globals of the code that called `pathlib`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in ("pathlib", "contextlib"):
        frame = frame.f_back
    return frame.f_globals


def _uname() -> os.uname_result:
    real = os.uname()
    return os.uname_result(("Darwin", real.nodename, "24.5.0", f"Darwin Kernel {VERSION}", "arm64"))


def _sysconf(name: str | int) -> int:
    known = {"SC_PAGE_SIZE": PAGE, "SC_PHYS_PAGES": FACTS["device_info"]["memory_size"] // PAGE}
    return known[name] if name in known else os.sysconf(name)
