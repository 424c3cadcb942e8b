"""Everything that can be shown of a kernel without Metal, in one call."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.metal_harness.build import FINITE
from tests.metal_harness.checking.checked_build import CHECKED
from tests.metal_harness.checking.checks import Checked, check
from tests.metal_harness.checking.strict import strict
from tests.metal_harness.checking.traffic import Traffic, copied_unasked, ledger, not_read_once
from tests.metal_harness.emulator import Dispatch, emulated

import mlx.core as mx

ORDERS = ("reverse", 1, 2)  # beside forward: threads in reverse, and two shuffles


@dataclass(frozen=True)
class Proven:
    """One dispatch, run in all orders and checked."""

    dispatch: Dispatch
    checked: Checked

    @property
    def traffic(self) -> dict[str, Traffic]:
        """By the buffer's name."""
        return {use.name: use for use in self.checked.traffic}

    def __str__(self) -> str:
        dispatch = self.dispatch
        size = f"grid {dispatch.grid}, threadgroup {dispatch.threadgroup}"
        head = f"{dispatch.name}: {size}, {self.checked.threadgroup_bytes:,} bytes of threadgroup memory"
        return f"{head}\n{ledger(self.checked.traffic)}"


@dataclass(frozen=True)
class Report:
    """What `prove` saw. `error` is the largest |got - want| over all outputs."""

    outputs: tuple[mx.array, ...]
    error: float
    dispatches: tuple[Proven, ...]

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.dispatches), f"largest error {self.error:.3g}"])


def prove(
    kernel: Callable,
    reference: Callable,
    *args: object,
    atol: float,
    rtol: float = 0.0,
    reads_once: Sequence[str] = (),
    copies: Sequence[str] = (),
    **kwargs: object,
) -> Report:
    """Run `kernel(*args, **kwargs)` with its Metal on the CPU, and put each of its dispatches through all checks.

    The strict pass; the instrumented run; forward, reverse and shuffled order of threads, with equal bits; values
    within `atol + rtol * |want|` of what `reference` returns for the same arguments, with its shapes and dtypes.

    Args:
        kernel: calls `mx.fast.metal_kernel` objects; makes them in functions with `functools.cache` in its own module
            (their caches are emptied), or anew for each call.
        reference: of the same signature; both return an array or a sequence of arrays.
        reads_once: buffers (their `input_names`) that must be read completely, each byte by one threadgroup only and
            never twice by one thread; counted over all dispatches.
        copies: inputs that MLX may copy before the kernel runs, because they are not contiguous by rows.

    Raises:
        AssertionError: what was found, a line each; the first dispatch with a finding is the last that is run.
    """
    proven: list[Proven] = []

    def examine(dispatch: Dispatch) -> None:
        """Checked before it runs unchecked, which after an access out of bounds would be at everyone's risk."""
        proven.append(Proven(dispatch, check(dispatch)))
        found = [*strict(dispatch.kernel), *proven[-1].checked.findings, *copied_unasked(dispatch.copies, copies)]
        _refuse([f"{dispatch.name}: {finding}" for finding in found or _differences(dispatch)], proven[-1])

    with emulated(*cached_functions(kernel), before=examine):
        outputs = _evaluated(kernel(*args, **kwargs))
    wanted = _evaluated(reference(*args, **kwargs))
    error, findings = compare(outputs, wanted, atol, rtol)
    if not proven:
        findings.append("no Metal kernel was called")
    findings += not_read_once([use for one in proven for use in one.checked.traffic], reads_once)
    report = Report(outputs, error, tuple(proven))
    _refuse(findings, report)
    return report


def _refuse(findings: Sequence[str], seen: object) -> None:
    if findings:
        raise AssertionError("\n".join([*findings, "", str(seen)]))


def cached_functions(kernel: Callable) -> list[Callable]:
    """Functions with a cache in the module of `kernel`: they may hold kernels made before."""
    module = sys.modules[kernel.__module__]
    return [value for value in vars(module).values() if hasattr(value, "cache_clear")]


def compare(got: Sequence[mx.array], wanted: Sequence[mx.array], atol: float, rtol: float) -> tuple[float, list[str]]:
    """The largest |got - wanted|, and a sentence for each output that differs by more than `atol + rtol * |wanted|`."""
    if len(got) != len(wanted):
        return np.inf, [f"{len(got)} outputs, the reference has {len(wanted)}"]
    worst, found = 0.0, []
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            found.append(f"output {index} is {one.dtype} {one.shape}, of the reference {other.dtype} {other.shape}")
            continue
        a, b = _values(one), _values(other)
        with np.errstate(invalid="ignore"):
            equal = (a == b) | (np.isnan(a) & np.isnan(b))
            difference = np.where(equal, 0.0, np.abs(a - b))
            wrong = ~equal & ~(difference <= atol + rtol * np.abs(b))  # a NaN on one side is wrong too
        worst = max(worst, float(difference.max(initial=0.0)))
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            found.append(
                f"output {index}: {wrong.sum()} of {wrong.size} values differ, first at {at}: "
                f"{a[at]:.7g}, of the reference {b[at]:.7g}"
            )
    return worst, found


def _differences(dispatch: Dispatch) -> list[str]:
    """Whether the outputs have other bits when threads run in another order, or in the instrumented build, where
    variables without a value are NaN, and so are functions of infinite numbers unless they are precise."""
    outputs = _bits(dispatch.run())
    found = [
        f"other values when threads run in another order ({order})"
        for order in ORDERS
        if _bits(dispatch.run(order)) != outputs
    ]
    if _bits(dispatch.run(mode=CHECKED)) == outputs:
        return found
    if _bits(dispatch.run(mode=FINITE)) != outputs:
        found.append("other values when functions are right for finite numbers only: exp(-inf) need not be 0")
    else:
        found.append("other values when compiled in another way: is a variable read before it has a value?")
    return found


def _evaluated(result: mx.array | Sequence[mx.array]) -> tuple[mx.array, ...]:
    arrays = (result,) if isinstance(result, mx.array) else tuple(result)
    mx.eval(arrays)
    return arrays


def _values(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def _bits(arrays: Sequence[mx.array]) -> list[bytes]:
    return [np.array(array.reshape(-1).view(mx.uint8)).tobytes() for array in arrays]
