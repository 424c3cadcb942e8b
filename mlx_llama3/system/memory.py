"""How much memory there is, a refusal before loading what does not fit, and wired memory on a Mac.

MLX wires what it holds, so that macOS does not page it out, up to a limit of the process that is 0 at first. While
there are models, the limit is the working set that Metal recommends for the chip.
"""

import os
import weakref
from pathlib import Path
from typing import Any

from mlx_llama3.errors import UserError

import mlx.core as mx


def available_memory() -> int:
    """Bytes that a model may take now.

    On the Mac's GPU the working set that Metal recommends; elsewhere the memory that is free or can be freed, as the
    kernel estimates it (`MemAvailable`).
    """
    if mx.metal.is_available():
        return int(mx.device_info(mx.gpu)["max_recommended_working_set_size"])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory() -> int:
    """Bytes that are left beside what MLX holds already; buffers that it keeps for reuse count as free."""
    if mx.metal.is_available():
        return max(0, available_memory() - mx.get_active_memory())
    return available_memory() + mx.get_cache_memory()


def check_memory(needed: int, what: str, hint: str, *, available: int | None = None) -> None:
    """Raise UserError if `needed` bytes for `what` are more than are `available`, by default `available_memory`."""
    available = available_memory() if available is None else available
    if needed > available:
        raise UserError(f"{what} needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available; {hint}")


class Wiring:
    """Raises the limit with the first model and puts it back with the last one, or when the program ends."""

    def __init__(self) -> None:
        self._models = 0
        self._before = 0

    def hold(self, model: Any) -> None:
        """Keep memory wired as long as `model` lives. Nothing where there is no Metal."""
        if not mx.metal.is_available():
            return
        if self._models == 0:
            self._before = mx.set_wired_limit(available_memory())
        self._models += 1
        weakref.finalize(model, self._release)  # called at exit too

    def _release(self) -> None:
        self._models -= 1
        if self._models == 0:
            mx.synchronize()  # MLX wants no change under a computation
            mx.set_wired_limit(self._before)


_OF_THIS_PROCESS = Wiring()


def hold_wired(model: Any) -> None:
    """Keep the memory of this process wired, within the chip's recommended working set, as long as `model` lives."""
    _OF_THIS_PROCESS.hold(model)
