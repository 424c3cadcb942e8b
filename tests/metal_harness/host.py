"""The machines on which the harness compiles and runs kernels: Linux on x86-64 or arm64."""

import platform
import sys

# What clang calls the processor, and the instructions that it may use.
_PROCESSORS = {"x86_64": ("x86_64", "-march=x86-64-v3"), "aarch64": ("aarch64", "-march=armv8.2-a+fp16")}


def unsupported(system: str, machine: str) -> str:
    """Why the harness cannot run on such a machine, in one sentence; "" where it can.

    Args:
        system, machine: as of `sys.platform` and `platform.machine()`.
    """
    if system == "linux" and machine in _PROCESSORS:
        return ""
    return f"the Metal harness runs on Linux on x86-64 or arm64, and this is {system} on {machine}"


UNSUPPORTED = unsupported(sys.platform, platform.machine())
PROCESSOR, INSTRUCTIONS = _PROCESSORS.get(platform.machine(), ("", ""))
