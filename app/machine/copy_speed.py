"""The bandwidth of a plain memory copy: the reference for `bench` if the chip's specification is not known."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import mlx_llama3  # first: it puts a fast BLAS in place before MLX is loaded  # noqa: F401
from mlx_llama3.autotune.choice import has_metal

import mlx.core as mx

SIZE = 2**28  # bytes, larger than any chip's cache
TRIES = 5


def copy_speed() -> float:
    """10**9 bytes per second, read plus written, of the fastest of `TRIES` copies by the GPU or by all CPU cores."""
    copy = _gpu_copy() if has_metal() else _cpu_copy()
    seconds = []
    for _ in range(TRIES + 1):  # the first one is not counted: it touches new memory
        begin = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - begin)
    return 2 * SIZE / min(seconds[1:]) / 1e9


def _gpu_copy() -> Callable[[], None]:
    source = mx.zeros((SIZE // 4,), mx.float32)
    mx.eval(source)
    return lambda: mx.eval(source + 1)


def _cpu_copy() -> Callable[[], None]:
    source, target = np.ones(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    cores = os.cpu_count() or 1
    pieces = [slice(SIZE * i // cores, SIZE * (i + 1) // cores) for i in range(cores)]

    def copy() -> None:
        with ThreadPoolExecutor(cores) as pool:  # NumPy releases Python's lock while it copies
            list(pool.map(lambda piece: np.copyto(target[piece], source[piece]), pieces))

    return copy
