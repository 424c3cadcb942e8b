"""The trial of a kernel on a stand-in device: correct or not, faster or slower, in spite of noise."""

import pytest
from stand_in_device import StandIn

from mlx_llama3.autotune.decisions import Decision
from mlx_llama3.autotune.trial import Case, Timing, compare, first_line, try_kernel

import mlx.core as mx


def broken(error: Exception):
    def fused(x: mx.array) -> mx.array:
        raise error

    return fused


def try_one(device: StandIn, **case):
    return try_kernel([device.case(**case)], device, Timing())


def test_correct_and_faster_is_used() -> None:
    decision = try_one(StandIn(noise=0.02))
    assert decision.state == "used"
    assert decision.ratio == pytest.approx(0.5, abs=0.02)
    assert "of the reference's time" in decision.reason


@pytest.mark.parametrize("seconds", [1.0e-5, 1.04e-5, 3e-5])
def test_what_is_not_faster_is_not_used(seconds) -> None:
    decision = try_one(StandIn(noise=0.05), seconds=seconds)
    assert decision.state == "slower"
    assert "of the reference's time" in decision.reason


@pytest.mark.parametrize(("seconds", "state"), [(0.97e-5, "used"), (1.03e-5, "slower")])
def test_three_per_cent_are_seen_through_noise_and_drift(seconds, state) -> None:
    for drift in (0.0, 2.0):  # 2: everything becomes a third slower during the trial
        decision = try_one(StandIn(noise=0.04, drift=drift), seconds=seconds)
        assert decision.state == state, decision
        assert decision.ratio == pytest.approx(seconds / 1e-5, abs=0.015)


def test_drift_alone_favours_neither() -> None:
    decision = try_one(StandIn(drift=2.0), seconds=1e-5)
    assert decision.state == "slower" and decision.ratio == pytest.approx(1, abs=0.01)


def test_a_trial_ends_in_time_however_noisy() -> None:
    device = StandIn(noise=3.0)
    timing = Timing(seconds=0.01)
    compare(device.case(), device, timing)
    slowest_round = 2 * 48 * 4e-5  # the kernel and its reference; two more calls warm them up
    assert device.now < timing.seconds + timing.min_rounds * slowest_round


@pytest.mark.parametrize(
    ("fused", "message"),
    [
        (lambda x: 2.001 * x, "output 0 differs by 0.0005 at most and 0.0005 RMS; 0.0001 and 2.5e-05 are allowed"),
        (lambda x: mx.where(mx.arange(64) == 7, 0, 2 * x), "output 0 differs by"),
        (lambda x: mx.where(mx.arange(64) == 7, mx.nan, 2 * x), "output 0 holds NaN or infinity"),
        (lambda x: mx.where(mx.arange(64) == 7, mx.inf, 2 * x), "output 0 holds NaN or infinity"),
        (lambda x: 2 * x[0], "output 0 has shape (1, 64), the reference (1, 1, 64)"),
        (lambda x: (2 * x).astype(mx.float16), "output 0 is float16, the reference float32"),
        (broken(RuntimeError("[metal::Device] Unable to build\nprogram:3: error: use of 'y'\n")), "error: use of 'y'"),
        (broken(ValueError("[metal_kernel] wrong grid")), "ValueError: [metal_kernel] wrong grid"),
        (broken(TypeError("no overload")), "TypeError: no overload"),
    ],
)
def test_wrong_or_broken_fails_and_is_not_timed(fused, message) -> None:
    device = StandIn()
    decision = try_one(device, fused=fused)
    assert decision.state == "failed" and decision.ratio is None
    assert decision.reason.startswith("one token: ") and message in decision.reason
    assert "\n" not in decision.reason
    assert device.runs <= 1


def test_what_breaks_only_when_it_is_timed_fails() -> None:
    calls = []

    def later(x: mx.array) -> mx.array:
        calls.append(x)
        return broken(RuntimeError("[metal::malloc] Resource limit exceeded."))(x) if len(calls) > 3 else 2 * x

    decision = try_one(StandIn(), fused=later)
    assert decision == Decision("failed", "one token: RuntimeError: [metal::malloc] Resource limit exceeded.")


def test_another_number_of_outputs_fails() -> None:
    device = StandIn()
    right = device.case()
    twice = Case("double", "x", right.inputs, lambda x: [2 * x, x], right.reference, right.next_inputs, mx.float32)
    assert try_kernel([twice], device, Timing()).reason == "x: 2 outputs, the reference has 1"


@pytest.mark.parametrize(
    ("dtype", "factor", "state"),
    [
        (mx.float32, 2.00002, "used"),
        (mx.float16, 2.0019, "used"),
        (mx.float16, 2.0117, "failed"),
        (mx.bfloat16, 2.0156, "used"),
        (mx.bfloat16, 2.0625, "failed"),
    ],
)
def test_the_tolerance_is_that_of_the_type(dtype, factor, state) -> None:
    assert try_one(StandIn(), dtype=dtype, fused=lambda x: (factor * x).astype(dtype)).state == state


def test_one_slow_case_is_one_too_many() -> None:
    device = StandIn(noise=0.02)
    cases = [device.case(), device.case(label="a prompt", seconds=2e-5)]
    decision = try_kernel(cases, device, Timing())
    assert decision.state == "slower" and decision.reason.startswith("a prompt: 2.0")
    cases = [device.case(label="a prompt", seconds=1e-5), device.case()]
    decision = try_kernel(cases, device, Timing())
    assert decision.state == "used" and decision.ratio == pytest.approx(0.5, abs=0.02)
    assert decision.reason.startswith("one token: ")


def test_a_wrong_case_counts_before_anything_is_timed() -> None:
    device = StandIn()
    cases = [device.case(), device.case(label="a prompt", fused=lambda x: x)]
    assert try_kernel(cases, device, Timing()).reason.startswith("a prompt: output 0 differs")
    assert device.runs == 2


def test_an_error_of_many_lines_becomes_one() -> None:
    long = RuntimeError("\n\nfirst\n  the  error:\there " + 500 * "x")
    assert first_line(long).startswith("RuntimeError: the error: here xxx")
    assert len(first_line(long)) < 230
    assert first_line(RuntimeError("")) == "RuntimeError: "
