"""The GPU that is not there: default device, streams, device information and memory limits, as MLX has them on a Mac.

All is computed on the CPU. A stream of the CPU counts as one of the GPU, unless it was made for the CPU.
"""

import json
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

FACTS = json.loads((Path(__file__).parent / "facts.json").read_text())


class Gpu:
    """Replaces the functions of `mlx.core` that know of devices."""

    def __init__(self, mx: ModuleType) -> None:
        self._mx, self._real = mx, {name: getattr(mx, name) for name in _REPLACED}
        self.gpu, self.cpu = mx.Device(mx.gpu, 0), mx.Device(mx.cpu, 0)
        self._default = self.gpu  # one for the process, as in MLX
        self._of_cpu: set[str] = set()  # the streams that were made for the CPU; `Stream` has no other identity
        self._thread = threading.local()
        self._wired_limit = 0

    def install(self) -> None:
        """Put the replacements in place, also for those who import single names from `mlx.core` afterwards."""
        mx = self._mx
        for name in _REPLACED:
            setattr(mx, name, getattr(self, name))
        mx.metal.is_available = lambda: True
        mx.metal.device_info = lambda: self.device_info(self.gpu)
        mx.metal.set_wired_limit = self.set_wired_limit
        mx.Stream.device = property(self._device_of_stream)

    def default_device(self) -> Any:
        return self._default

    def set_default_device(self, device: Any) -> None:
        self._default = self._as_device(device)

    def device_count(self, device_type: Any) -> int:
        return 1

    def is_available(self, device: Any) -> bool:
        return self._as_device(device) in (self.gpu, self.cpu)

    def device_info(self, d: Any = None) -> dict[str, str | int]:
        if self._as_device(self._default if d is None else d) == self.gpu:
            return dict(FACTS["device_info"])
        return self._real["device_info"](self.cpu)

    def set_wired_limit(self, limit: int) -> int:
        if limit > FACTS["device_info"]["max_recommended_working_set_size"]:
            raise ValueError(FACTS["wired_limit_error"])
        previous, self._wired_limit = self._wired_limit, limit
        return previous

    def default_stream(self, device: Any) -> Any:
        return self._gpu_stream() if self._as_device(device) == self.gpu else self._cpu_stream()

    def set_default_stream(self, stream: Any) -> None:
        if stream.device == self.gpu:
            self._real["set_default_stream"](stream)
        else:
            self._thread.cpu_stream = stream

    def new_stream(self, device: Any) -> Any:
        return self._made_for(device, self._real["new_stream"](self.cpu))

    def new_thread_unsafe_stream(self, device: Any) -> Any:
        return self._made_for(device, self._real["new_thread_unsafe_stream"](self.cpu))

    def new_thread_local_stream(self, device: Any) -> Any:
        return self._made_for(device, self._real["new_thread_local_stream"](self.cpu))

    def stream(self, where: Any) -> "_Within":
        """`where`: a device, a device's type, or a stream."""
        self._gpu_stream()  # kept, before another one becomes the thread's
        is_stream = isinstance(where, self._mx.Stream | self._mx.ThreadLocalStream)
        device = self._device_of_stream(where) if is_stream else self._as_device(where)
        return _Within(self, device, self._real["stream"](where if is_stream else self.default_stream(device)))

    def _as_device(self, device: Any) -> Any:
        return self._mx.Device(device, 0) if isinstance(device, self._mx.DeviceType) else device

    def _made_for(self, device: Any, stream: Any) -> Any:
        if self._as_device(device) == self.cpu:
            self._of_cpu.add(_identity(stream))
        return stream

    def _device_of_stream(self, stream: Any) -> Any:
        return self.cpu if _identity(stream) in self._of_cpu else self.gpu

    def _gpu_stream(self) -> Any:
        """The GPU's default stream of this thread."""
        stream = self._real["default_stream"](self.cpu)
        if self._device_of_stream(stream) == self.gpu:
            self._thread.gpu_stream = stream
        return self._thread.gpu_stream

    def _cpu_stream(self) -> Any:
        """The CPU's default stream of this thread, another one than the GPU's."""
        if not hasattr(self._thread, "cpu_stream"):
            self._thread.cpu_stream = self.new_stream(self.cpu)
        return self._thread.cpu_stream


class _Within:
    """`with mx.stream(...)`: also the default device follows."""

    def __init__(self, gpu: Gpu, device: Any, context: Any) -> None:
        self._gpu, self._device, self._context = gpu, device, context

    def __enter__(self) -> None:
        self._before = self._gpu.default_device()
        self._gpu.set_default_device(self._device)
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._gpu.set_default_device(self._before)
        return self._context.__exit__(*error)


_REPLACED = (
    *("default_device", "set_default_device", "device_count", "is_available", "device_info", "set_wired_limit"),
    *("default_stream", "set_default_stream", "new_stream", "new_thread_unsafe_stream", "new_thread_local_stream"),
    "stream",
)


def _identity(stream: Any) -> str:
    """`Stream(Device(cpu, 0), 2)`: the number is the stream's own."""
    return repr(stream)
