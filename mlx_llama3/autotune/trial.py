"""The trial of one kernel: is it right, and is it faster than its reference, on the shapes of the loaded model?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from mlx_llama3.autotune.decisions import Decision

import mlx.core as mx
import mlx.nn as nn

# Largest difference from the reference, as a share of the largest value of an output; the root mean square of the
# difference, as a share of the output's, may be a quarter of it. Both round in the model's dtype, at other places.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 4e-2}

# What MLX raises when a kernel does not compile, or is given what it does not take.
FAULTS = (RuntimeError, ValueError, TypeError)

Arrays = Sequence[mx.array]


@dataclass(frozen=True)
class Case:
    """One use of a kernel by a model.

    kernel: its name. label: of the use, for people. inputs: arrays of real shapes and types, and which weights to use.
    fused, reference: from the inputs to the outputs, of the same shapes and types.
    again: from the inputs and the outputs to the next call's inputs, so that calls wait for one another as in a model.
    dtype: of the model's activations, which sets the tolerance.
    weights: what else the call depends on, for the key. calls: in a row, for one reading of the clock; a wait for the
    device takes as long as some twenty small kernels. slack: how many times the tolerance is allowed.
    queued: time the making of the graph as well; each call is queued while the next one is made, as in decoding. One
    more goes before, for what is recorded at the first call.
    """

    kernel: str
    label: str
    inputs: tuple[Any, ...]
    fused: Callable[..., Arrays]
    reference: Callable[..., Arrays]
    again: Callable[[tuple[Any, ...], Arrays], tuple[Any, ...]]
    dtype: mx.Dtype
    weights: str = ""
    calls: int = 48
    slack: float = 1
    queued: bool = False

    @property
    def key(self) -> str:
        """Kernel, shapes and types, as one string."""
        arrays = [each for each in self.inputs if isinstance(each, mx.array)]
        shapes = ",".join(f"{name(each.dtype)}{list(each.shape)}" for each in arrays)
        return f"{self.kernel}({shapes}) {self.weights}".replace(" ", "")


@dataclass(frozen=True)
class Timing:
    """How long to look at one case: at most so many `seconds`, but not fewer than `fewest` rounds."""

    seconds: float = 0.08
    fewest: int = 5
    most: int = 60


class Device:
    """The machine as a trial sees it: computes, and tells the time."""

    def clock(self) -> float:
        """Seconds."""
        return perf_counter()

    def queue(self, arrays: Arrays) -> None:
        """Begin to compute these, and return at once."""
        mx.async_eval(*arrays)

    def run(self, arrays: Arrays) -> None:
        """Compute these, and wait."""
        mx.eval(*arrays)
        mx.synchronize()


def try_kernel(cases: Sequence[Case], device: Device, timing: Timing) -> Decision:
    """Whether a kernel may serve: right in all its cases, faster in one at least, slower in none."""
    best, reason = 1.0, ""
    try:
        for case in cases:
            if wrong := difference(case, device):
                return Decision("failed", f"{case.label}: {wrong}")
        for case in cases:
            ratio, spread = compare(case, device, timing)
            told = f"{case.label}: {ratio:.2f} of the reference's time (±{spread:.2f})"
            if ratio - spread > 1.01:
                return Decision("slower", told, ratio)
            if ratio + spread < 1 and ratio < best:
                best, reason = ratio, told
            reason = reason or told
    except FAULTS as error:
        return Decision("failed", f"{case.label}: {first_line(error)}")
    return Decision("used", reason, best) if best < 1 else Decision("slower", f"not faster; {reason}", ratio)


def difference(case: Case, device: Device) -> str | None:
    """What is wrong with the kernel's outputs, in words; None if they are the reference's. Raises `FAULTS`."""
    expected = list(case.reference(*case.inputs))
    found = list(case.fused(*case.inputs))
    device.run([*expected, *found])
    if len(found) != len(expected):
        return f"{len(found)} outputs, the reference has {len(expected)}"
    for index, (f, r) in enumerate(zip(found, expected, strict=True)):
        if wrong := _unlike(f, r, case.slack * TOLERANCE[case.dtype]):
            return f"output {index} {wrong}"
    return None


def _unlike(found: mx.array, expected: mx.array, tolerance: float) -> str | None:
    if found.shape != expected.shape:
        return f"has shape {found.shape}, the reference {expected.shape}"
    if found.dtype != expected.dtype:
        return f"is {name(found.dtype)}, the reference {name(expected.dtype)}"
    f, r = found.astype(mx.float32), expected.astype(mx.float32)
    if not mx.isfinite(f).all().item():
        return "holds NaN or infinity"
    largest = mx.abs(f - r).max().item() / max(mx.abs(r).max().item(), 1e-30)
    typical = (mx.square(f - r).mean().item() / max(mx.square(r).mean().item(), 1e-30)) ** 0.5
    if largest > tolerance or typical > tolerance / 4:
        return (
            f"differs by {largest:.1g} at most and {typical:.1g} typically; {tolerance:g} and {tolerance / 4:g} may be"
        )
    return None


def compare(case: Case, device: Device, timing: Timing) -> tuple[float, float]:
    """The kernel's time over its reference's: the median over rounds, and how far it may be off.

    A round times both, and each comes first in every other round, so that neither a drift of the clock rate nor what
    the other left in caches favours one. Rounds go on until the median is known to 1.5 %, or clearly says who wins.
    """
    for call in (case.reference, case.fused):
        _seconds(case, call, device)  # compiles, and brings the device to its clock rate
    ratios: list[float] = []
    begin = device.clock()
    while len(ratios) < timing.most:
        order = (case.fused, case.reference) if len(ratios) % 2 else (case.reference, case.fused)
        seconds = {call is case.fused: _seconds(case, call, device) for call in order}
        ratios.append(seconds[True] / seconds[False])
        if len(ratios) < timing.fewest:
            continue
        spread = _spread(ratios)
        far = abs(median(ratios) - 1) > spread + 0.03
        if spread < 0.015 or far or device.clock() - begin > timing.seconds:
            break
    return median(ratios), _spread(ratios)


def _spread(ratios: list[float]) -> float:
    """Two standard errors of the median, from the middle half of the values, whatever the outliers are.

    Of normal values the middle half spans 1.35 standard deviations, and the median's error is 1.25 of the mean's.
    """
    low, _, high = quantiles(ratios, n=4)
    return 2 * 1.25 * (high - low) / 1.35 / len(ratios) ** 0.5


def _seconds(case: Case, call: Callable[..., Arrays], device: Device) -> float:
    """Of a row of calls, each on what the one before gave. What a model does not use (the reference's squared norms)
    is not computed."""
    if case.queued:
        device.run(call(*case.inputs))
    inputs, begin = case.inputs, device.clock()
    for _ in range(case.calls):
        inputs = case.again(inputs, call(*inputs))
        if case.queued:
            device.queue(inputs)
    if not case.queued:
        begin = device.clock()  # in a model, making the graph runs ahead of the device
    device.run(inputs)
    return max(device.clock() - begin, 1e-9)


def first_line(error: BaseException) -> str:
    """An error in one line: of a compiler's output the first line that says "error", or else the first at all."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    line = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
    return f"{type(error).__name__}: {line:.200}"


def matrix_form(matrix: nn.Module) -> str:
    """How a matrix is stored: its bits and groups if it is quantized, its type and shape."""
    kind = f"{matrix.bits}bit/{matrix.group_size}{matrix.mode}" if isinstance(matrix, nn.QuantizedLinear) else "dense"
    return f"{kind}{name(matrix.weight.dtype)}{list(matrix.weight.shape)}"


def name(dtype: Any) -> str:
    """`bfloat16` for `mx.bfloat16`."""
    return str(dtype).rsplit(".", 1)[-1]
