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

FEW_ROWS = 4  # of x, from which the dequantized matrix is faster

_KERNEL_LOCK = threading.Lock()
_traced = threading.local()
_emulations: list[Any] = []


def install(mx: ModuleType, mode: str) -> None:
    """Replace the functions of `mlx.core`; `mode` is one of `MODES`."""
    mx.fast.metal_kernel = functools.partial(_LazyKernel, mx, mx.fast.metal_kernel)
    mx.quantized_matmul = _quantized_matmul(mx, mx.quantized_matmul)
    mx.matmul, mx.array.__matmul__ = _matmul(mx, mx.matmul), _matmul(mx, mx.array.__matmul__)
    mx.fast.scaled_dot_product_attention = _attention(mx, mx.fast.scaled_dot_product_attention)
    if mode == KERNELS:
        mx.disable_compile()
    else:
        mx.compile = _marking_traces(mx.compile)


def kernel_calls() -> dict[str, int]:
    """How often each kernel ran in this process."""
    return {name: count for each in _emulations for name, count in each.calls.items()}


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
                self._kernel = _emulator(self._real).EmulatedKernel(*self._args, **self._options)
        return self._kernel(**call)


@functools.cache
def _emulator(real: Callable) -> ModuleType:
    """The harness, switched on for the whole process; `real`: MLX's own function, which makes the text of a kernel."""
    from tests.metal_harness import emulator

    emulator._metal_kernel = real  # a test may have imported the harness, and with it the stand-in's function
    _emulations.append(emulator.stay_emulated())
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
    """In float32, and 16-bit results rounded once. For many rows the matrix is dequantized first, as on a GPU."""

    @functools.wraps(real)
    def quantized_matmul(
        x: Any, w: Any, /, scales: Any, biases: Any = None, transpose: bool = True, *args: Any, **options: Any
    ) -> Any:
        if not transpose or w.ndim > 2 or scales.dtype not in (x.dtype, mx.uint8):
            return real(x, w, scales, biases, transpose, *args, **options)
        wide = [each if each is None or each.dtype != x.dtype else each.astype(mx.float32) for each in (scales, biases)]
        rows = x.astype(mx.float32)
        if x.size < FEW_ROWS * x.shape[-1] or args or "stream" in options:
            return real(rows, w, *wide, transpose, *args, **options).astype(x.dtype)
        dense = mx.dequantize(w, scales, biases, **options)  # in 16 bits, as Metal's kernel for many rows
        return (rows @ dense.astype(mx.float32).T).astype(x.dtype)

    return quantized_matmul


def _matmul(mx: ModuleType, real: Callable) -> Callable:
    """16-bit products in float32, rounded once: as exact as MLX's own on the CPU, and ten times as fast."""

    @functools.wraps(real)
    def matmul(a: Any, b: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(b, mx.array) or a.dtype != b.dtype or a.dtype not in (mx.float16, mx.bfloat16):
            return real(a, b, *args, **options)
        return real(a.astype(mx.float32), b.astype(mx.float32), *args, **options).astype(a.dtype)

    return matmul


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
