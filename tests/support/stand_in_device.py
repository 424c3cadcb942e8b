"""A device without Metal, on which kernels are as fast, wrong or broken as a test says."""

import random
from collections.abc import Callable

import mlx_llama3  # first: it puts a fast BLAS in place before MLX is loaded  # noqa: F401
from mlx_llama3.autotune.trial import Case, Device

import mlx.core as mx


class StandIn(Device):
    """Work is queued with a cost; its clock moves when that is run.

    noise: share of a cost by which it varies at random. drift: share by which all becomes slower with every second.
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
        """A kernel that doubles its input; `fused` puts something else in its place."""

        def right(x: mx.array) -> list[mx.array]:
            self.spend(reference_seconds)
            return [x + x]

        def other(x: mx.array) -> list[mx.array]:
            self.spend(seconds)
            return [(fused or (lambda x: 2 * x))(x)]

        x = mx.random.normal((1, 1, 64), key=mx.random.key(0)).astype(dtype)
        return Case(kernel, label, (x,), other, right, lambda inputs, outputs: (outputs[0] / 2,), dtype)
