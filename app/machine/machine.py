"""The facts of the machine that `doctor` and `bench` report."""

import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import mlx_llama3  # first: it puts a fast BLAS in place before MLX is loaded
from app.machine.apple_chips import bandwidth
from app.machine.mlx_wheel import metal_wheel
from mlx_llama3.autotune.choice import has_metal
from mlx_llama3.system.memory import available_memory

import mlx.core as mx


@dataclass(frozen=True)
class Machine:
    """The facts of a machine and process.

    memory: bytes of physical memory. available: bytes that a model may use. bandwidth: the chip's memory bandwidth by
    Apple's specification, in 10**9 bytes per second; None if it is not known. wheel: the platform of the installed
    `mlx-metal`; None where it is not installed. tf32: the value of `MLX_ENABLE_TF32`; None if it is not set.
    """

    chip: str
    memory: int
    available: int
    bandwidth: float | None
    system: str
    python: str
    version: str
    mlx: str
    mlx_lm: str | None
    metal: bool
    wheel: str | None = None
    tf32: str | None = None


def this_machine() -> Machine:
    """The facts of this machine."""
    chip = str(mx.device_info()["device_name"])
    return Machine(
        chip,
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_memory(),
        bandwidth(chip),
        _system(),
        f"{platform.python_version()} ({platform.machine()})",
        mlx_llama3.__version__,
        mx.__version__,
        mlx_lm_version(),
        has_metal(),
        metal_wheel(),
        os.environ.get("MLX_ENABLE_TF32"),
    )


def mlx_lm_version() -> str | None:
    """The version of mlx-lm; None if it is not installed."""
    try:
        return version("mlx-lm") if importlib.util.find_spec("mlx_lm") else None
    except PackageNotFoundError:
        return None


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    return f"{platform.system()} {platform.release()}"
