"""Runs a compiled kernel on memory of this process."""

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from math import prod

import numpy as np

from tests.metal_harness import build
from tests.metal_harness.source import Kernel

ORDERS = {"forward": 0, "reverse": 1}
_SHUFFLED = 2
MAX_THREADS = 1024  # of a threadgroup, of every Apple GPU


class KernelError(Exception):
    """What went wrong while a kernel ran."""


class Launch(ctypes.Structure):
    """`Launch` of runtime.c."""

    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("threadgroup_memory", ctypes.c_uint64 * 2),
        ("observer", ctypes.c_void_p),
    ]


def launch(
    kernel: Kernel,
    buffers: Sequence[np.ndarray],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    order: str | int = "forward",
    mode: build.Mode = build.RUN,
    observer: int | None = None,
) -> None:
    """Run `kernel` on `buffers`, one for each of `kernel.buffers`; those of outputs are written.

    Args:
        grid, threadgroup: threads; a threadgroup larger than the grid is cut to it, as MLX does.
        order: of lanes, simdgroups and threadgroups: "forward", "reverse", or the seed of a shuffle.
        observer: address of a `MetalObserver`.

    Raises:
        KernelError: a barrier or simdgroup operation that not all threads reach, a fault, or a limit of Metal.
        ValueError: the number of buffers is another, or a size is below 1.
    """
    if len(buffers) != len(kernel.buffers):
        raise ValueError(f"{kernel.name} has {len(kernel.buffers)} buffers, got {len(buffers)}")
    if min(threadgroup) < 1 or min(grid) < 0:
        raise ValueError(f"{kernel.name}: no grid of {grid} threads in threadgroups of {threadgroup}")
    library = loaded(kernel, mode)
    addresses = np.array([buffer.ctypes.data for buffer in buffers], np.uint64)
    launch = Launch(
        ctypes.cast(library.metal_entry, ctypes.c_void_p).value,
        addresses.ctypes.data,
        tuple(grid),
        tuple(min(pair) for pair in zip(threadgroup, grid, strict=True)),
        ORDERS.get(order, _SHUFFLED),
        0 if order in ORDERS else order,
    )
    launch.observer = observer
    library.metal_threadgroup_memory(launch.threadgroup_memory)
    if prod(grid) == 0:
        return
    message = ctypes.create_string_buffer(500)
    with _one_at_a_time:
        failed = runtime().metal_launch(ctypes.byref(launch), message, len(message))
    if failed:
        raise KernelError(f"{kernel.name}: {message.value.decode()}")


# Threadgroup memory and the executor's state exist once.
_one_at_a_time = threading.Lock()


@cache
def runtime() -> ctypes.CDLL:
    """The executor. Its symbols are global: kernels are linked to it when they are loaded."""
    return ctypes.CDLL(str(build.runtime()), mode=ctypes.RTLD_GLOBAL)


@cache
def loaded(kernel: Kernel, mode: build.Mode) -> ctypes.CDLL:
    """The compiled kernel: `metal_entry` runs one thread, `metal_threadgroup_memory` tells where that memory is."""
    runtime()
    return ctypes.CDLL(str(build.library(kernel, mode)))
