"""Stands in for `mx.fast.metal_kernel`, so that code that calls Metal kernels runs on a machine without Metal."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tests.metal_harness.build import RUN, Mode
from tests.metal_harness.executor import MAX_THREADS, KernelError, launch
from tests.metal_harness.source import Kernel, generated

import mlx.core as mx

_NUMPY = {
    mx.bool_: np.bool_,
    mx.uint8: np.uint8,
    mx.uint16: np.uint16,
    mx.uint32: np.uint32,
    mx.uint64: np.uint64,
    mx.int8: np.int8,
    mx.int16: np.int16,
    mx.int32: np.int32,
    mx.int64: np.int64,
    mx.float16: np.float16,
    mx.float32: np.float32,
    mx.bfloat16: np.uint16,  # numpy has no such type: the bits
}


@dataclass
class Dispatch:
    """One call of a kernel, with its inputs evaluated; can be run again and again."""

    name: str
    kernel: Kernel
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    inputs: list[mx.array]
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]

    def run(self, order: str | int = "forward", mode: Mode = RUN, observer: int | None = None) -> list[mx.array]:
        """The outputs. What a kernel leaves unwritten is NaN (all bits set), as is its threadgroup memory at the start.

        Arguments and errors as of `executor.launch`.
        """
        outputs = self.empty_outputs()
        launch(self.kernel, self.buffers(outputs), self.grid, self.threadgroup, order, mode, observer)
        return self.to_mlx(outputs)

    def to_mlx(self, outputs: list[np.ndarray]) -> list[mx.array]:
        """`outputs`, in memory of their own."""
        return [_to_mlx(output, dtype) for output, dtype in zip(outputs, self.output_dtypes, strict=True)]

    def buffers(self, outputs: list[np.ndarray]) -> list[np.ndarray]:
        """One array for each of `kernel.buffers`: inputs with what the kernel names of them, then `outputs`."""
        found = {}
        for name, array in zip(self.input_names, self.inputs, strict=True):
            values = _to_numpy(array, self.kernel.row_contiguous)
            found[name] = values
            found[f"{name}_shape"] = np.array(values.shape, np.int32)
            found[f"{name}_strides"] = np.array([stride // values.itemsize for stride in values.strides], np.int64)
            found[f"{name}_ndim"] = np.array(values.ndim, np.int32)
        found |= zip(self.output_names, outputs, strict=True)
        return [found[parameter.name] for parameter in self.kernel.buffers]

    @property
    def copies(self) -> dict[str, int]:
        """Bytes of each input that MLX copies before the kernel runs, because it is not contiguous by rows."""
        if not self.kernel.row_contiguous:
            return {}
        inputs = zip(self.input_names, self.inputs, strict=True)
        return {name: array.nbytes for name, array in inputs if not _bits(array).flags.c_contiguous}

    def empty_outputs(self) -> list[np.ndarray]:
        """Memory for the outputs: `init_value`, or all bits set."""
        outputs = []
        for shape, dtype in zip(self.output_shapes, self.output_dtypes, strict=True):
            output = _aligned(shape, _NUMPY[dtype])
            if self.kernel.init_value is None:
                output.reshape(-1).view(np.uint8).fill(0xFF)
            else:
                output[...] = _to_numpy(mx.array(self.kernel.init_value, dtype))
            outputs.append(output)
        return outputs


@dataclass
class Emulation:
    """What ran under `emulated`: `calls` by the kernel's name, `copied` bytes of inputs that were not contiguous, by
    the kernel's name and the input's; and each `Dispatch` if asked for."""

    order: str | int = "forward"
    mode: Mode = RUN
    record: bool = False
    before: Callable[[Dispatch], None] | None = None
    max_threads: int = MAX_THREADS
    calls: Counter = field(default_factory=Counter)
    copied: Counter = field(default_factory=Counter)
    dispatches: list[Dispatch] = field(default_factory=list)
    _sources: dict[str, str] = field(default_factory=dict)

    def called(self, prefix: str) -> int:
        """How often kernels ran whose names begin with `prefix`."""
        return sum(count for name, count in self.calls.items() if name.startswith(prefix))

    def run(self, dispatch: Dispatch) -> list[mx.array]:
        """The outputs of `dispatch`. Errors as of `emulated`."""
        self._refuse(dispatch)
        self.calls[dispatch.name] += 1
        self.copied.update({(dispatch.name, name): size for name, size in dispatch.copies.items()})
        if self.record:
            self.dispatches.append(dispatch)
        if self.before is not None:
            self.before(dispatch)
        return dispatch.run(self.order, self.mode)

    def _refuse(self, dispatch: Dispatch) -> None:
        kernel, threads = dispatch.kernel, prod(dispatch.threadgroup)
        if self._sources.setdefault(kernel.name, kernel.source) != kernel.source:
            raise KernelError(f"{kernel.name}: two kernels have this name; each source needs a name of its own")
        if (
            threads > self.max_threads
        ):  # MLX's words, and its type; MLX looks before it cuts the threadgroup to the grid
            raise ValueError(
                f"Thread group size ({threads}) is greater than  the maximum allowed threads per threadgroup "
                f"({self.max_threads})."
            )


_metal_kernel = mx.fast.metal_kernel
_active: list[Emulation] = []


class EmulatedKernel:
    """As the object that `mx.fast.metal_kernel` returns. Outside of `emulated` it is that object."""

    def __init__(self, name: str, input_names: Sequence[str], output_names: Sequence[str], *args, **options) -> None:
        self.name, self.input_names, self.output_names = name, tuple(input_names), tuple(output_names)
        self._original = _metal_kernel(name, input_names, output_names, *args, **options)
        self._kernels: dict[tuple, Kernel] = {}

    def __call__(self, **call) -> list[mx.array]:
        if not _active:
            return self._original(**call)
        mx.eval(call["inputs"])
        inputs = [value if isinstance(value, mx.array) else mx.array(value) for value in call["inputs"]]
        dispatch = Dispatch(
            self.name,
            self._kernel({**call, "inputs": inputs}),
            self.input_names,
            self.output_names,
            inputs,
            [tuple(shape) for shape in call["output_shapes"]],
            list(call["output_dtypes"]),
            tuple(call["grid"]),
            tuple(call["threadgroup"]),
        )
        return _active[-1].run(dispatch)

    def _kernel(self, call: dict) -> Kernel:
        """The generated kernel; kept by what its text depends on, because tracing takes longer than a small kernel."""
        inputs = tuple((value.dtype, value.ndim == 0, value.size < 8) for value in call["inputs"])
        template = tuple((name, str(value)) for name, value in call.get("template") or ())
        key = (inputs, template, tuple(call["output_dtypes"]), call.get("init_value"))
        if key not in self._kernels or call.get("verbose"):
            self._kernels[key] = generated(self._original, **call)
        return self._kernels[key]


@contextmanager
def emulated(
    *builders: Callable,
    order: str | int = "forward",
    mode: Mode = RUN,
    record: bool = False,
    before: Callable[[Dispatch], None] | None = None,
    max_threads: int = MAX_THREADS,
) -> Iterator[Emulation]:
    """Within the block, kernels made with `mx.fast.metal_kernel` run on the CPU, and `mx.compile` does nothing.

    Args:
        builders: functions with `functools.cache` that make kernels; their caches are emptied, so that a kernel made
            before the block is made anew. A kernel that something else keeps from before is not emulated.
        order, mode: as of `executor.launch`.
        record: keep every `Dispatch`, inputs and all.
        before: called with each `Dispatch` before it runs.
        max_threads: most threads a threadgroup. A GPU allows a kernel fewer than 1024 if a thread needs many registers.

    Raises, within the block:
        BuildError: the compiler's, and for more than 31 buffers.
        KernelError: as of `executor.launch`; and for two kernels of one name, of which MLX before 0.32.1 ran the first
            one's code for both (mlx issue 3832).
        ValueError: more than `max_threads`, as MLX raises it; it does so when it evaluates the outputs, which is here
            the call itself.
    """
    emulation = Emulation(order, mode, record, before, max_threads)
    for builder in builders:
        builder.cache_clear()
    _active.append(emulation)
    mx.fast.metal_kernel = EmulatedKernel
    mx.disable_compile()
    try:
        yield emulation
    finally:
        _active.pop()
        if not _active:
            mx.fast.metal_kernel = _metal_kernel
            if "MLX_DISABLE_COMPILE" not in os.environ:
                mx.enable_compile()


def stay_emulated() -> Emulation:
    """Kernels made as `EmulatedKernel` run on the CPU from now on, until the process ends.

    `mx.fast.metal_kernel` and `mx.compile` stay as they are.
    """
    emulation = Emulation()
    _active.insert(0, emulation)
    return emulation


def _to_numpy(array: mx.array, row_contiguous: bool = True) -> np.ndarray:
    """The values, bfloat16 as bits, at an address where a kernel may read vectors."""
    values = _bits(array)
    if row_contiguous and not values.flags.c_contiguous:
        values = np.ascontiguousarray(values)
    if values.ctypes.data % 16 == 0 or not values.flags.c_contiguous:
        return values
    copy = _aligned(values.shape, values.dtype)
    copy[...] = values
    return copy


def _bits(array: mx.array) -> np.ndarray:
    """The values in MLX's own memory, with its strides; bfloat16 as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def _aligned(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Memory that begins at a multiple of 64 bytes; MLX's own on the CPU begins 8 bytes after one."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _to_mlx(values: np.ndarray, dtype: mx.Dtype) -> mx.array:
    array = mx.array(values)
    return array.view(dtype) if array.dtype != dtype else array
