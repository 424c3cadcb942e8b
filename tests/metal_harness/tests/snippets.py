"""Dispatches of a few lines of Metal, for tests of the harness itself."""

from collections.abc import Sequence

from tests.metal_harness.emulator import Dispatch
from tests.metal_harness.source import generated

import mlx.core as mx


def dispatch_of(
    source: str,
    inputs: dict[str, mx.array],
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]],
    *,
    grid: tuple[int, int, int] = (64, 1, 1),
    threadgroup: tuple[int, int, int] = (64, 1, 1),
    header: str = "",
    template: Sequence[tuple] = (),
    init_value: float | None = None,
    row_contiguous: bool = True,
) -> Dispatch:
    """A kernel of the body `source`, not run yet; `outputs` are shapes and dtypes by name."""
    kernel = mx.fast.metal_kernel("snippet", list(inputs), list(outputs), source, header, row_contiguous)
    shapes, dtypes = [shape for shape, _ in outputs.values()], [dtype for _, dtype in outputs.values()]
    call = {"inputs": list(inputs.values()), "output_shapes": shapes, "output_dtypes": dtypes, "init_value": init_value}
    made = generated(kernel, **call, template=list(template), grid=grid, threadgroup=threadgroup)
    mx.eval(call["inputs"])
    return Dispatch("snippet", made, tuple(inputs), tuple(outputs), call["inputs"], shapes, dtypes, grid, threadgroup)


def first_line(dispatch: Dispatch) -> int:
    """Number of the body's first line, which follows an empty one, in the generated source."""
    lines = dispatch.kernel.source.splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.rstrip().endswith("{")) + 1
