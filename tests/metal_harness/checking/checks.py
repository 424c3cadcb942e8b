"""A run of a kernel with every access checked: bounds, races, uninitialized reads, alignment, indices, shifts.

The kernel is compiled with clang's sanitizers, whose callbacks are those of `instrumented/`. They know the buffers of
the dispatch and the threadgroup variables byte by byte: who touched a byte last, from which line, after how many
barriers. What they count is also the traffic of each buffer (traffic.py).
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from tests.metal_harness import build, executor
from tests.metal_harness.checking.checked_build import CHECKED
from tests.metal_harness.checking.lines import find_line, section_sizes
from tests.metal_harness.checking.traffic import COUNTERS, Traffic
from tests.metal_harness.emulator import Dispatch
from tests.metal_harness.source import Kernel

MAX_THREADGROUP_MEMORY = 32 << 10  # of every Apple GPU

INPUT, OUTPUT, THREADGROUP, CONSTANT = range(4)
PROBLEMS = (
    "access out of bounds",
    "write to an input",
    "race",
    "read of what nobody wrote",
    "output written twice",
    "index out of range",
    "misaligned access",
    "shift by more than the bits of the type",
    "integer division by zero",
    "float outside of the integer type's range",
    "signed integer overflow",
)
OUT_OF_BOUNDS, WRITE_TO_INPUT, RACE, UNINITIALIZED, WRITTEN_TWICE = range(5)


class _Region(ctypes.Structure):
    """`Region` of instrumented/checks.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("start", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("initialized", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("read", "unique_read", "group_read", "reread")),
        *((name, ctypes.c_uint64) for name in ("written", "unique_written", "group_written", "guard")),
        ("shadow", ctypes.c_void_p),
    ]


class _Finding(ctypes.Structure):
    """`Finding` of instrumented/checks.h."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("problem", "line")),
        *((name, ctypes.c_int64) for name in ("region", "offset")),
        *((name, ctypes.c_uint64) for name in ("size", "site", "other_site")),
        *((name, ctypes.c_uint32) for name in ("thread", "group", "other_thread", "other_group")),
        *((name, ctypes.c_uint32) for name in ("is_write", "other_is_write")),
    ]


@dataclass(frozen=True)
class Checked:
    """Outcome of `check`: sentences, each with the line of the Metal source; nothing found is an empty tuple."""

    findings: tuple[str, ...]
    traffic: tuple[Traffic, ...]
    threadgroup_bytes: int


def check(dispatch: Dispatch, order: str | int = "forward") -> Checked:
    """Run `dispatch` instrumented, on outputs of its own. What is found is not raised."""
    buffers = dispatch.buffers(dispatch.empty_outputs())
    checked = check_launch(dispatch.kernel, buffers, dispatch.grid, dispatch.threadgroup, order)
    copies = dispatch.copies
    return replace(checked, traffic=tuple(replace(use, copied=copies.get(use.name, 0)) for use in checked.traffic))


def check_launch(
    kernel: Kernel,
    buffers: Sequence[np.ndarray],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    order: str | int = "forward",
) -> Checked:
    """As `check`; arguments as of `executor.launch`. The buffers stay as they are: copies are used."""
    buffers = _apart(buffers)
    runtime, library = executor.runtime(), executor.loaded(kernel, CHECKED)
    entry = ctypes.cast(library.metal_entry, ctypes.c_void_p)
    given = _given_regions(kernel, buffers)  # kept until the end: the names lie in it
    runtime.checks_begin(entry, given, len(buffers))
    stopped, counts = [], (ctypes.c_int * 2)()
    try:
        observer = ctypes.addressof(ctypes.c_char.in_dll(runtime, "checks_observer"))
        executor.launch(kernel, buffers, grid, threadgroup, order, CHECKED, observer)
    except executor.KernelError as error:
        stopped = [str(error)]
    finally:
        runtime.checks_end(counts)
    regions = _table(runtime.checks_regions, _Region, counts[1])
    describe = _Describer(kernel, build.library(kernel, CHECKED), regions)
    found = [describe(finding) for finding in _table(runtime.checks_findings, _Finding, counts[0])]
    used = regions[: len(buffers)]
    memory = section_sizes(build.library(kernel)).get("threadgroup", 0)
    findings = [*found, *(stopped if not found else []), *_limits(threadgroup, memory)]
    if not stopped:
        findings += [_unwritten(region) for region in used if _is_unwritten(region)]
    return Checked(tuple(findings), tuple(map(_traffic, used)), memory)


def _apart(buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Copies with the same strides, far from each other: what leaves one does not end in the next."""
    gap = 1 << 20
    starts = np.cumsum([0, *(-(-_span(array) // 4096) * 4096 + gap for array in buffers)]) + gap
    memory = np.zeros(starts[-1] + gap, np.uint8)  # pages that nobody touches cost nothing
    starts += -memory.ctypes.data % 4096
    copies = []
    for array, start in zip(buffers, starts[:-1], strict=True):
        values = memory[start : start + _span(array)].view(array.dtype)
        copies.append(np.lib.stride_tricks.as_strided(values, array.shape, array.strides))
        copies[-1][...] = array
    return copies


def _span(array: np.ndarray) -> int:
    """Bytes from the first element to the end of the last one."""
    if not array.size:
        return 0
    steps = sum((count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True))
    return steps + array.itemsize


def _given_regions(kernel: Kernel, buffers: Sequence[np.ndarray]) -> ctypes.Array:
    regions = (_Region * len(buffers))()
    for region, parameter, array in zip(regions, kernel.buffers, buffers, strict=True):
        region.name = parameter.name.encode()
        region.start = array.ctypes.data
        region.size = _span(array)
        is_input = parameter.const or parameter.space == "constant"
        region.kind = INPUT if is_input else OUTPUT
        region.initialized = not is_input and kernel.init_value is not None
    return regions


def _table(function, kind: type, count: int) -> list:
    function.restype = ctypes.POINTER(kind)
    return [kind.from_buffer_copy(entry) for entry in function()[:count]]


def _traffic(region: _Region) -> Traffic:
    return Traffic(region.name.decode(), region.size, **{name: getattr(region, name) for name in COUNTERS})


def _is_unwritten(region: _Region) -> bool:
    return region.kind == OUTPUT and not region.initialized and region.unique_written < region.size


def _unwritten(region: _Region) -> str:
    missing = region.size - region.unique_written
    return f"output {region.name.decode()}: {missing} of {region.size} bytes are never written"


def _limits(threadgroup: tuple[int, int, int], memory: int) -> list[str]:
    threads = prod(threadgroup)
    found = []
    if threads > executor.MAX_THREADS:
        found.append(f"{threads} threads a threadgroup, Metal takes at most {executor.MAX_THREADS}")
    if memory > MAX_THREADGROUP_MEMORY:
        found.append(f"{memory} bytes of threadgroup memory, Metal takes at most {MAX_THREADGROUP_MEMORY}")
    return found


class _Describer:
    """Turns what the callbacks noted into a sentence."""

    def __init__(self, kernel: Kernel, library: Path, regions: Sequence[_Region]) -> None:
        self.kernel, self.library, self.regions = kernel, library, regions

    def __call__(self, finding: _Finding) -> str:
        place = f"line {finding.line}" if finding.line else self.line(finding.site)
        text = f"{place}: {PROBLEMS[finding.problem]}"
        if finding.region >= 0:
            text += f", {'write to' if finding.is_write else 'read of'} {self.where(finding)}"
        text += f", thread {finding.thread} of threadgroup {finding.group}"
        if finding.problem in (RACE, WRITTEN_TWICE):
            kind = "write" if finding.other_is_write else "read"
            text += f"; {kind} by thread {finding.other_thread} of threadgroup {finding.other_group}"
            text += f" at {self.line(finding.other_site)}"
        return text

    def where(self, finding: _Finding) -> str:
        region = self.regions[finding.region]
        name = region.name.decode().rpartition("::")[2]
        return f"{name} at byte {finding.offset} of {region.size}"

    def line(self, site: int) -> str:
        file, line = find_line(self.library, site - 1) if site else ("", 0)
        if not line:
            return "an unknown line"
        name = Path(file).name
        return f"line {line}" if name == f"{self.kernel.name}.metal" else f"{name} line {line}"
