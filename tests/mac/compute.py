"""What the GPU computes: custom kernels in the harness, `mx.compile` in two modes, 16-bit products rounded once.

`COMPILED`: `mx.compile` compiles. Within it a kernel gets tracers instead of values, so its reference takes its place;
kernels outside of it run. `KERNELS`: `mx.compile` does nothing, and every kernel runs.
"""

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.mac.gpu import FACTS

COMPILED, KERNELS = "compiled", "kernels"
MODES = (COMPILED, KERNELS)

_KERNEL_LOCK = threading.Lock()
_traced = threading.local()


def install(mx: ModuleType, mode: str) -> None:
    """Replace the functions of `mlx.core`; `mode` is one of `MODES`."""
    mx.fast.metal_kernel = functools.partial(_LazyKernel, mx, mx.fast.metal_kernel)
    mx.quantized_matmul = _quantized_matmul(mx, mx.quantized_matmul)
    mx.fast.scaled_dot_product_attention = _attention(mx, mx.fast.scaled_dot_product_attention)
    if mode == KERNELS:
        mx.disable_compile()
    else:
        mx.compile = _marking_traces(mx.compile)


def unless_traced(fused: Callable, reference: Callable) -> Callable:
    """`fused`, but `reference` while `mx.compile` traces."""

    @functools.wraps(fused)
    def call(*args: Any, **options: Any) -> Any:
        return (reference if getattr(_traced, "depth", 0) else fused)(*args, **options)

    return call


class _LazyKernel:
    """A kernel that runs in the harness, which is loaded when the first kernel runs."""

    def __init__(self, mx: ModuleType, real: Callable, *args: Any, **options: Any) -> None:
        self._mx, self._real, self._args, self._options = mx, real, args, options
        self._kernel: Any = None

    def __call__(self, **call: Any) -> Any:
        if self._mx.default_device() == self._mx.cpu:
            raise ValueError(FACTS["kernel_on_cpu_error"])
        with _KERNEL_LOCK:
            if self._kernel is None:
                self._kernel = _emulator(self._mx, self._real).EmulatedKernel(*self._args, **self._options)
        return self._kernel(**call)


def _emulator(mx: ModuleType, real: Callable) -> ModuleType:
    """The harness, which keeps MLX's own function when it is imported, and is switched on for the whole process."""
    stand_in, mx.fast.metal_kernel = mx.fast.metal_kernel, real
    try:
        from tests.metal_harness import emulator
    finally:
        mx.fast.metal_kernel = stand_in
    emulator.stay_emulated()
    return emulator


def _marking_traces(real: Callable) -> Callable:
    """`mx.compile`, with a mark on this thread while a function is traced."""

    @functools.wraps(real)
    def compile(function: Callable, *args: Any, **options: Any) -> Callable:
        @functools.wraps(function)
        def traced(*inputs: Any, **more: Any) -> Any:
            _traced.depth = getattr(_traced, "depth", 0) + 1
            try:
                return function(*inputs, **more)
            finally:
                _traced.depth -= 1

        return real(traced, *args, **options)

    return compile


def _quantized_matmul(mx: ModuleType, real: Callable) -> Callable:
    """In float32 and rounded once, where x has 16 bits and the scales have its type, or bytes as of mxfp4."""

    @functools.wraps(real)
    def quantized_matmul(x: Any, w: Any, /, scales: Any, biases: Any = None, *args: Any, **options: Any) -> Any:
        if x.dtype not in (mx.float16, mx.bfloat16) or scales.dtype not in (x.dtype, mx.uint8):
            return real(x, w, scales, biases, *args, **options)
        wide = [each if each is None or each.dtype != x.dtype else each.astype(mx.float32) for each in (scales, biases)]
        return real(x.astype(mx.float32), w, *wide, *args, **options).astype(x.dtype)

    return quantized_matmul


def _attention(mx: ModuleType, real: Callable) -> Callable:
    """In float32 and rounded once, where all have the same 16-bit type."""

    @functools.wraps(real)
    def scaled_dot_product_attention(q: Any, k: Any, v: Any, *, mask: Any = None, **options: Any) -> Any:
        if q.dtype not in (mx.float16, mx.bfloat16) or not q.dtype == k.dtype == v.dtype:
            return real(q, k, v, mask=mask, **options)
        if isinstance(mask, mx.array) and mask.dtype == q.dtype:
            mask = mask.astype(mx.float32)
        return real(*(each.astype(mx.float32) for each in (q, k, v)), mask=mask, **options).astype(q.dtype)

    return scaled_dot_product_attention
