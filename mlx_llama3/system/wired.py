"""Wired memory: on a Mac the weights of a running model stay in memory, where the system could otherwise page them out.

MLX wires what it holds up to a limit of the process, which is 0 until somebody asks. While there are models, it is the
working set that Metal recommends for the chip, of which what was wired before is part.
"""

import weakref
from typing import Any

import mlx.core as mx

from mlx_llama3.system.memory import available_memory


class Wiring:
    """Raises the limit with the first model and puts it back with the last one, or when the program ends."""

    def __init__(self) -> None:
        self._models = 0
        self._before = 0

    def hold(self, model: Any) -> None:
        """Keep memory wired as long as `model` lives. Nothing where there is no Metal."""
        if not mx.metal.is_available():
            return
        if self._models == 0:
            self._before = mx.set_wired_limit(available_memory())
        self._models += 1
        weakref.finalize(model, self._release)  # called at exit too

    def _release(self) -> None:
        self._models -= 1
        if self._models == 0:
            mx.synchronize()  # MLX wants no change under a computation
            mx.set_wired_limit(self._before)


_OF_THIS_PROCESS = Wiring()


def hold_wired(model: Any) -> None:
    """Keep the memory of this process wired, within the chip's recommended working set, as long as `model` lives."""
    _OF_THIS_PROCESS.hold(model)
