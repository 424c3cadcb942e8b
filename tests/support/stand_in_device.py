"""A simulated device, on which a test sets the speed and the faults of kernels."""

import random
from collections.abc import Callable

import mlx_llama3  # first: it puts a fast BLAS in place before MLX is loaded  # noqa: F401
from mlx_llama3.autotune.trial import Case, Device

import mlx.core as mx


class StandIn(Device):
    """A device with a simulated clock, which advances by the cost of queued work when that is run.

    noise: the random variation of a cost, as a share. drift: the share by which work becomes slower per second.
    """

    def __init__(self, *, noise: float = 0.0, drift: float = 0.0) -> None:
        self.now, self.runs, self._queued = 0.0, 0, 0.0
        self._noise, self._drift, self._random = noise, drift, random.Random(0)

    def clock(self) -> float:
        return self.now

    def run(self, arrays) -> None:
        mx.eval(*arrays)
        self.runs += 1
        self.now += self._queued * (1 + self._random.uniform(0, self._noise)) * (1 + self._drift * self.now)
        self._queued = 0.0

    def spend(self, seconds: float) -> None:
        self._queued += seconds

    def case(
        self,
        kernel: str = "double",
        *,
        seconds: float = 0.5e-5,
        reference_seconds: float = 1e-5,
        fused: Callable[[mx.array], mx.array] | None = None,
        dtype: mx.Dtype = mx.float32,
        label: str = "one token",
    ) -> Case:
        """A trial of a kernel that doubles its input; `fused` replaces its function."""

        def reference(x: mx.array) -> list[mx.array]:
            self.spend(reference_seconds)
            return [x + x]

        def kernel_function(x: mx.array) -> list[mx.array]:
            self.spend(seconds)
            return [(fused or (lambda x: 2 * x))(x)]

        x = mx.random.normal((1, 1, 64), key=mx.random.key(0)).astype(dtype)
        return Case(kernel, label, (x,), kernel_function, reference, lambda inputs, outputs: (outputs[0] / 2,), dtype)
