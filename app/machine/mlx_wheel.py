"""Which build of MLX is installed, and whether it can use the chip's matrix units."""

import re
from importlib.metadata import PackageNotFoundError, distribution

# The matrix units of the M5 (Metal 4) are used by the wheels for macOS 26 and later only; without them others measured
# prompts to take 2 to 4 times as long.
_MATRIX_UNITS = re.compile(r"Apple (?:M([5-9]|\d\d)|A(19|[2-9]\d))\b")
_FIRST_MACOS = 26


def metal_wheel() -> str | None:
    """The platform tag of the installed `mlx-metal` wheel, as `macosx_15_0_arm64`; None if there is none."""
    try:
        tags = distribution("mlx-metal").read_text("WHEEL") or ""
    except PackageNotFoundError:
        return None
    match = re.search(r"^Tag: \S+-(macosx_\S+)$", tags, re.MULTILINE)
    return match[1] if match else None


def missing_matrix_units(chip: str, wheel: str | None) -> str | None:
    """One sentence if this wheel leaves the chip's matrix units unused; None if it uses them or nothing is known."""
    version = re.match(r"macosx_(\d+)_", wheel or "")
    if version is None or not _MATRIX_UNITS.search(chip) or int(version[1]) >= _FIRST_MACOS:
        return None
    return (
        f"the MLX wheel for macOS {version[1]} leaves this chip's matrix units unused, which read prompts 2 to 4 times "
        f"as fast; update to macOS {_FIRST_MACOS} and reinstall mlx"
    )
