"""Available memory, a check before loading what does not fit, and wired memory on a Mac.

MLX wires its buffers, so that macOS does not page them out, up to a limit of the process that is 0 at first. While a
model is loaded, the limit is the working set that Metal recommends for the chip.
"""

import os
import weakref
from pathlib import Path
from typing import Any

from mlx_llama3.errors import UserError

import mlx.core as mx


def available_memory() -> int:
    """Bytes that a model may use now.

    With Metal, the recommended working set of the GPU. On Linux, the kernel's estimate of the memory that is free or
    can be freed (`MemAvailable`). Elsewhere, all physical memory.
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
    """Bytes left beside MLX's active memory; the buffers that MLX caches for reuse count as free."""
    if mx.metal.is_available():
        return max(0, available_memory() - mx.get_active_memory())
    return available_memory() + mx.get_cache_memory()


def check_memory(needed: int, what: str, hint: str, *, available: int | None = None) -> None:
    """Raise UserError if `what` needs more bytes than `available` (default: `available_memory()`)."""
    available = available_memory() if available is None else available
    if needed > available:
        raise UserError(f"{what} needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available; {hint}")


class Wiring:
    """Raises MLX's wired limit for the first model; restores it after the last one, or when the program ends."""

    def __init__(self) -> None:
        self._models = 0
        self._previous_limit = 0

    def hold(self, model: Any) -> None:
        """Keep memory wired as long as `model` lives. Does nothing without Metal."""
        if not mx.metal.is_available():
            return
        if self._models == 0:
            self._previous_limit = mx.set_wired_limit(available_memory())
        self._models += 1
        weakref.finalize(model, self._release)  # also called at exit

    def _release(self) -> None:
        self._models -= 1
        if self._models == 0:
            mx.synchronize()  # the limit must not change during a computation
            mx.set_wired_limit(self._previous_limit)


_PROCESS_WIRING = Wiring()


def hold_wired(model: Any) -> None:
    """Keep the memory of this process wired, within the chip's recommended working set, as long as `model` lives."""
    _PROCESS_WIRING.hold(model)
