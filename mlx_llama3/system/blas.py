"""A fast BLAS for MLX's CPU backend on Linux, in the place of the reference BLAS that its wheel links.

The wheel multiplies matrices at about 2 GFLOP/s; OpenBLAS (PyPI package `cmeel-openblas`) does so at 60 to 160 on two
cores. libmlx binds `cblas_sgemm` when it is loaded and looks first among the globally visible libraries, so loading
OpenBLAS globally *before* `mlx.core` is imported is enough. Where anything of this is missing, MLX's own serves.
"""

import ctypes
import logging
import os
import platform
import sys
import sysconfig
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

_CPUINFO = Path("/proc/cpuinfo")
_WANTED = b"libgfortran.so.5"
# What the package's OpenBLAS (0.3.31) is compiled for, SKYLAKEX and NEOVERSEN2: on a processor without, it ends the
# process by an illegal instruction. Names as in /proc/cpuinfo.
_BUILT_FOR = {
    "x86_64": {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"},
    "aarch64": {"sve", "sve2", "bf16"},
}


def use_openblas() -> bool:
    """Load OpenBLAS for MLX; True if it will be used. Call before the first import of `mlx.core`.

    Does nothing (False) on other systems than Linux, when `mlx.core` is imported already, when the package is absent or
    built for other processors, or when `MLX_LLAMA3_BLAS=reference` asks for the wheel's own.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules or os.environ.get("MLX_LLAMA3_BLAS") == "reference":
        return False
    site = Path(sysconfig.get_paths()["purelib"])
    library = site / "cmeel.prefix" / "lib" / "libopenblas.so"
    if not library.exists():
        log.info("OpenBLAS is not installed; the CPU uses MLX's reference BLAS, which is slow")
        return False
    if missing := _BUILT_FOR.get(platform.machine(), set()) - _processor_features():
        log.warning(
            "this processor has no %s, which OpenBLAS is built for; it uses MLX's reference BLAS, which is slow",
            ", ".join(sorted(missing)),
        )
        return False
    try:
        openblas = _load(library, site / "mlx_cpu.libs")
    except OSError as error:
        log.warning("OpenBLAS cannot be loaded (%s); the CPU uses MLX's reference BLAS, which is slow", error)
        return False
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        openblas.openblas_set_num_threads(1)  # cpu.py uses the cores, without the spinning of OpenBLAS's threads
    return True


def _processor_features() -> set[str]:
    """Of the first processor; the others have the same."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    named = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features")))
    return set(next(named, "").split())


def _load(library: Path, runtime: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError:  # it links the system's libgfortran, which a bare machine does not have
        _load_fortran_runtime(runtime)
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _load_fortran_runtime(libraries: Path) -> None:
    """Load the Fortran runtime that the MLX wheel bundles, under the name that OpenBLAS asks the loader for.

    The wheel's copy bears a mangled name (`libgfortran-<hash>.so.5`) in its SONAME, by which the loader would not find
    it. A temporary copy with the plain name written over the mangled one (shorter, so nothing moves) is loaded and
    unlinked at once; the mapping stays.
    """
    for quadmath in libraries.glob("libquadmath-*"):
        ctypes.CDLL(str(quadmath))  # found by its own SONAME when the runtime asks for it
    bundled = next(libraries.glob("libgfortran-*"), None)
    if bundled is None:
        raise OSError(f"no libgfortran in {libraries}")
    mangled = bundled.name.encode() + b"\0"
    image = bundled.read_bytes()
    if image.count(mangled) != 1 or len(mangled) <= len(_WANTED):
        raise OSError(f"{bundled.name} does not name itself as expected")
    with tempfile.NamedTemporaryFile(prefix="libgfortran-", suffix=".so.5") as copy:
        copy.write(image.replace(mangled, _WANTED.ljust(len(mangled), b"\0")))
        copy.flush()
        ctypes.CDLL(copy.name, mode=ctypes.RTLD_GLOBAL)
