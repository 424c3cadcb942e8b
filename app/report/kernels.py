"""The kernels of a model on this machine: whether each compiles, how exact it is, and how fast."""

from typing import TYPE_CHECKING, Any

from mlx_llama3.autotune.cases import model_cases
from mlx_llama3.autotune.trial import FAULTS, TOLERANCE, Case, Device, Timing, compare, first_line, relative_errors
from mlx_llama3.model.kernels.kernel_set import FUSED

if TYPE_CHECKING:
    from mlx_llama3.model.transformer import Transformer


def kernel_section(model: "Transformer") -> dict[str, list[dict[str, Any]]]:
    """By kernel, its cases in the shapes of `model`: the result of each, or the words of the compiler."""
    device = Device()
    return {kernel: [_result(case, device) for case in cases] for kernel, cases in model_cases(model).items()}


def _result(case: Case, device: Device) -> dict[str, Any]:
    """`errors`: largest and RMS difference from the reference, relative to its own; `ratio`: time over its time."""
    result: dict[str, Any] = {"case": case.label, "shapes": case.key}
    try:
        expected, outputs = list(case.reference(*case.inputs)), list(case.fused(*case.inputs))
        device.run([*expected, *outputs])
        errors = [relative_errors(output, reference) for output, reference in zip(outputs, expected, strict=True)]
        largest, rms = max(error[0] for error in errors), max(error[1] for error in errors)
        allowed = case.slack * TOLERANCE[case.dtype]
        right = largest <= allowed and rms <= allowed / 4  # NaN is not
        result |= {"right": right, "errors": [largest, rms], "allowed": [allowed, allowed / 4]}
        ratio, spread = compare(case, device, Timing())
        return result | {"ratio": ratio, "spread": spread}
    except FAULTS as error:
        return result | {"right": False, "failed": first_line(error), "words": str(error)[:4000]}


def step_section(model: "Transformer") -> dict[str, Any]:
    """All kernels together in the model's decoding step, as the last trial of `autotune` runs them."""
    from mlx_llama3.autotune.whole_step import step_case

    return _result(step_case(model, FUSED), Device())
