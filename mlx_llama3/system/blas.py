"""OpenBLAS for MLX's CPU backend on Linux, instead of the reference BLAS that the MLX wheel links.

The wheel's BLAS multiplies matrices at about 2 GFLOP/s; OpenBLAS (PyPI package `cmeel-openblas`) reaches 60 to 160 on
two cores. libmlx binds `cblas_sgemm` when it is loaded, and the loader searches the globally visible libraries first.
So it is enough to load OpenBLAS globally *before* `mlx.core` is imported. If that fails, MLX uses its own BLAS.
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
_GFORTRAN_SONAME = b"libgfortran.so.5"
# The CPU features that the package's OpenBLAS (0.3.31) is compiled for: SKYLAKEX and NEOVERSEN2. On a processor that
# lacks one, the process dies of an illegal instruction. Names as in /proc/cpuinfo.
_REQUIRED_FEATURES = {
    "x86_64": {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"},
    "aarch64": {"sve", "sve2", "bf16"},
}


def use_openblas() -> bool:
    """Load OpenBLAS for MLX; return whether MLX will use it. Call before the first import of `mlx.core`.

    Returns False and loads nothing if the system is not Linux, if `mlx.core` is imported already, if the package is
    absent or built for other processors, or if `MLX_LLAMA3_BLAS=reference` selects the wheel's BLAS.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules or os.environ.get("MLX_LLAMA3_BLAS") == "reference":
        return False
    site = Path(sysconfig.get_paths()["purelib"])
    library = site / "cmeel.prefix" / "lib" / "libopenblas.so"
    if not library.exists():
        log.info("OpenBLAS is not installed; the CPU uses MLX's reference BLAS, which is slow")
        return False
    if missing := _REQUIRED_FEATURES.get(platform.machine(), set()) - _processor_features():
        log.warning(
            "this processor has no %s, which OpenBLAS needs; the CPU uses MLX's reference BLAS, which is slow",
            ", ".join(sorted(missing)),
        )
        return False
    try:
        openblas = _load(library, site / "mlx_cpu.libs")
    except OSError as error:
        log.warning("OpenBLAS cannot be loaded (%s); the CPU uses MLX's reference BLAS, which is slow", error)
        return False
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        # `model/layers/tiled_linear.py` spreads the work over the cores; OpenBLAS's own threads would spin.
        openblas.openblas_set_num_threads(1)
    return True


def _processor_features() -> set[str]:
    """The feature names of the first processor in `/proc/cpuinfo`; the others have the same."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    features = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features")))
    return set(next(features, "").split())


def _load(library: Path, runtime: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError:  # OpenBLAS links the system's libgfortran, which a minimal system does not have
        _load_fortran_runtime(runtime)
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _load_fortran_runtime(libraries: Path) -> None:
    """Load the Fortran runtime that the MLX wheel bundles, under the SONAME that OpenBLAS links.

    The wheel's copy has a mangled SONAME (`libgfortran-<hash>.so.5`), so the loader would not match it. A temporary
    copy with the plain name written over the mangled one (shorter, so nothing moves) is loaded and unlinked at once;
    its mapping stays.
    """
    for quadmath in libraries.glob("libquadmath-*"):
        ctypes.CDLL(str(quadmath))  # loaded first: the runtime links it by its SONAME
    bundled = next(libraries.glob("libgfortran-*"), None)
    if bundled is None:
        raise OSError(f"no libgfortran in {libraries}")
    mangled = bundled.name.encode() + b"\0"
    image = bundled.read_bytes()
    if image.count(mangled) != 1 or len(mangled) <= len(_GFORTRAN_SONAME):
        raise OSError(f"{bundled.name} does not name itself as expected")
    with tempfile.NamedTemporaryFile(prefix="libgfortran-", suffix=".so.5") as copy:
        copy.write(image.replace(mangled, _GFORTRAN_SONAME.ljust(len(mangled), b"\0")))
        copy.flush()
        ctypes.CDLL(copy.name, mode=ctypes.RTLD_GLOBAL)
