"""The trial of one kernel: is it correct, and faster than its reference, on the shapes of the loaded model?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from mlx_llama3.autotune.decisions import ByRows, Decision
from mlx_llama3.model.kernels.kernel_set import Rows

import mlx.core as mx
import mlx.nn as nn

# Allowed maximum difference from the reference, relative to the output's largest absolute value. The allowed root mean
# square of the difference, relative to the output's, is a quarter of it. Kernel and reference round in the model's
# dtype, but at different places.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 4e-2}

# What MLX raises when a kernel does not compile, or when its arguments are invalid.
FAULTS = (RuntimeError, ValueError, TypeError)

Arrays = Sequence[mx.array]


@dataclass(frozen=True)
class Case:
    """One use of a kernel by a model.

    kernel: its name. label: the use, for messages. inputs: arrays of the model's shapes and types, and the index of the
    weights.
    fused, reference: functions from the inputs to the outputs, of the same shapes and types.
    next_inputs: from the inputs and outputs of a call to the inputs of the next, so that calls depend on each other as
    in a model.
    dtype: of the model's activations; sets the tolerance.
    weights: what else the call depends on, for the key.
    calls: number of consecutive calls that are timed together, since a wait for the device takes as long as about
    twenty small kernels.
    slack: a factor on the tolerance.
    rows: the numbers of rows that the case stands for.
    beside: other kernels, which the reference runs. The case counts only where they are used.
    queued: also time the building of the graph; each call is queued while the next one is built, as in decoding. One
    call runs first, because the first call compiles.
    """

    kernel: str
    label: str
    inputs: tuple[Any, ...]
    fused: Callable[..., Arrays]
    reference: Callable[..., Arrays]
    next_inputs: Callable[[tuple[Any, ...], Arrays], tuple[Any, ...]]
    dtype: mx.Dtype
    weights: str = ""
    calls: int = 48
    slack: float = 1
    queued: bool = False
    rows: Rows = Rows.ONE
    beside: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Kernel, shapes and types, as one string."""
        arrays = [value for value in self.inputs if isinstance(value, mx.array)]
        shapes = ",".join(f"{dtype_name(array.dtype)}{list(array.shape)}" for array in arrays)
        return f"{self.kernel}({shapes}) {self.weights}".replace(" ", "")


@dataclass(frozen=True)
class Timing:
    """How long to time one case: about `seconds` at most, but `min_rounds` to `max_rounds` rounds."""

    seconds: float = 0.08
    min_rounds: int = 5
    max_rounds: int = 60


class Device:
    """What a trial needs of the machine: computing and a clock. Tests replace it."""

    def clock(self) -> float:
        """Seconds."""
        return perf_counter()

    def queue(self, arrays: Arrays) -> None:
        """Start to compute the arrays, and return at once."""
        mx.async_eval(*arrays)

    def run(self, arrays: Arrays) -> None:
        """Compute the arrays, and wait for them."""
        mx.eval(*arrays)
        mx.synchronize()


def try_by_rows(cases: Sequence[Case], device: Device, timing: Timing) -> ByRows:
    """Decide at which numbers of rows to use a kernel: `try_kernel` with the cases of each.

    A kernel that is wrong or does not run at one of them is used at none.
    """
    decisions: dict[Rows, Decision] = {}
    for rows in Rows:
        if same := [case for case in cases if case.rows == rows]:
            decisions[rows] = try_kernel(same, device, timing)
            if decisions[rows].state == "failed":
                return {Rows.ALL: decisions[rows]}
    return decisions


def try_kernel(cases: Sequence[Case], device: Device, timing: Timing) -> Decision:
    """Decide whether to use a kernel: if it is correct in all its cases, faster in at least one, and slower in none."""
    best, reason = 1.0, ""
    try:
        for case in cases:
            if wrong := difference(case, device):
                return Decision("failed", f"{case.label}: {wrong}")
        for case in cases:
            ratio, spread = compare(case, device, timing)
            result = f"{case.label}: {ratio:.2f} of the reference's time (±{spread:.2f})"
            if ratio - spread > 1.01:
                return Decision("slower", result, ratio)
            if ratio + spread < 1 and ratio < best:
                best, reason = ratio, result
            reason = reason or result
    except FAULTS as error:
        return Decision("failed", f"{case.label}: {first_line(error)}")
    return Decision("used", reason, best) if best < 1 else Decision("slower", f"not faster; {reason}", ratio)


def difference(case: Case, device: Device) -> str | None:
    """How the kernel's outputs differ from the reference's, as text; None if they agree. Raises `FAULTS`."""
    expected = list(case.reference(*case.inputs))
    outputs = list(case.fused(*case.inputs))
    device.run([*expected, *outputs])
    if len(outputs) != len(expected):
        return f"{len(outputs)} outputs, the reference has {len(expected)}"
    for index, (output, reference) in enumerate(zip(outputs, expected, strict=True)):
        if wrong := _mismatch(output, reference, case.slack * TOLERANCE[case.dtype]):
            return f"output {index} {wrong}"
    return None


def _mismatch(output: mx.array, reference: mx.array, tolerance: float) -> str | None:
    if output.shape != reference.shape:
        return f"has shape {output.shape}, the reference {reference.shape}"
    if output.dtype != reference.dtype:
        return f"is {dtype_name(output.dtype)}, the reference {dtype_name(reference.dtype)}"
    if not mx.isfinite(output.astype(mx.float32)).all().item():
        return "holds NaN or infinity"
    largest, rms = relative_errors(output, reference)
    if largest > tolerance or rms > tolerance / 4:
        return f"differs by {largest:.1g} at most and {rms:.1g} RMS; {tolerance:g} and {tolerance / 4:g} are allowed"
    return None


def relative_errors(output: mx.array, reference: mx.array) -> tuple[float, float]:
    """The largest and the root mean square difference, each relative to the same measure of the reference."""
    f, r = output.astype(mx.float32), reference.astype(mx.float32)
    largest, mean_square = mx.abs(f - r).max().item(), mx.square(f - r).mean().item()
    scale, scale_square = mx.abs(r).max().item(), mx.square(r).mean().item()
    return float(largest / max(scale, 1e-30)), float((mean_square / max(scale_square, 1e-30)) ** 0.5)


def compare(case: Case, device: Device, timing: Timing) -> tuple[float, float]:
    """The kernel's time divided by its reference's: the median over rounds, and the uncertainty of that median.

    A round times both, in alternating order, so that neither a drifting clock rate nor the contents of the caches
    favours one. Rounds repeat until the median is known to 1.5 %, or clearly decides.
    """
    for call in (case.reference, case.fused):
        _seconds(case, call, device)  # compiles, and brings the device to its full clock rate
    ratios: list[float] = []
    start = device.clock()
    while len(ratios) < timing.max_rounds:
        order = (case.fused, case.reference) if len(ratios) % 2 else (case.reference, case.fused)
        seconds = {call is case.fused: _seconds(case, call, device) for call in order}
        ratios.append(seconds[True] / seconds[False])
        if len(ratios) < timing.min_rounds:
            continue
        spread = _spread(ratios)
        decided = abs(median(ratios) - 1) > spread + 0.03
        if spread < 0.015 or decided or device.clock() - start > timing.seconds:
            break
    return median(ratios), _spread(ratios)


def _spread(ratios: list[float]) -> float:
    """Two standard errors of the median, from the interquartile range, which ignores outliers.

    For normally distributed values that range is 1.35 standard deviations, and the standard error of the median is 1.25
    times that of the mean.
    """
    low, _, high = quantiles(ratios, n=4)
    return 2 * 1.25 * (high - low) / 1.35 / len(ratios) ** 0.5


def _seconds(case: Case, call: Callable[..., Arrays], device: Device) -> float:
    """Time `case.calls` calls, each on the outputs of the one before.

    Outputs that a model does not use (the reference's squared norms) are not computed.
    """
    if case.queued:
        device.run(call(*case.inputs))
    inputs, start = case.inputs, device.clock()
    for _ in range(case.calls):
        inputs = case.next_inputs(inputs, call(*inputs))
        if case.queued:
            device.queue(inputs)
    if not case.queued:
        start = device.clock()  # in a model, the host builds the graph while the device computes
    device.run(inputs)
    return max(device.clock() - start, 1e-9)


def first_line(error: BaseException) -> str:
    """An error in one line: the first line of its message that contains "error", or else the first line."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    line = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
    return f"{type(error).__name__}: {line:.200}"


def matrix_form(matrix: nn.Module) -> str:
    """The storage form of a matrix, as a string: bits and group size if it is quantized, dtype and shape."""
    kind = f"{matrix.bits}bit/{matrix.group_size}{matrix.mode}" if isinstance(matrix, nn.QuantizedLinear) else "dense"
    return f"{kind}{dtype_name(matrix.weight.dtype)}{list(matrix.weight.shape)}"


def dtype_name(dtype: Any) -> str:
    """`bfloat16` for `mx.bfloat16`."""
    return str(dtype).rsplit(".", 1)[-1]
