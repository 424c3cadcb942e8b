"""How much memory there is, and a refusal before loading what does not fit."""

import os
from pathlib import Path

import mlx.core as mx

from mlx_llama3.errors import UserError


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


def check_memory(needed: int, what: str, way_out: str, *, available: int | None = None) -> None:
    """Raise UserError if `needed` bytes for `what` are more than are `available`, by default `available_memory`."""
    available = available_memory() if available is None else available
    if needed > available:
        raise UserError(
            f"{what} needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available; {way_out}"
        )
