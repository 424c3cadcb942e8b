"""The MLX wheel: whether it uses the matrix units of the chip."""

import pytest

from app.machine import mlx_wheel
from app.machine.mlx_wheel import metal_wheel, missing_matrix_units


@pytest.mark.parametrize(
    ("chip", "wheel", "is_missing"),
    [
        ("Apple M5", "macosx_15_0_arm64", True),
        ("Apple M5 Max", "macosx_14_0_arm64", True),
        ("Apple M10 Pro", "macosx_15_0_arm64", True),
        ("Apple M5", "macosx_26_0_arm64", False),
        ("Apple M4 Max", "macosx_15_0_arm64", False),
        ("Apple M1", "macosx_14_0_arm64", False),
        ("AMD EPYC", None, False),
        ("Apple M5", None, False),
    ],
)
def test_the_matrix_units_come_with_the_wheel_for_macos_26(chip, wheel, is_missing):
    sentence = missing_matrix_units(chip, wheel)
    assert (sentence is not None) == is_missing
    assert sentence is None or "update to macOS 26 and reinstall mlx" in sentence


def test_the_tag_of_the_installed_wheel(monkeypatch):
    class Installed:
        @staticmethod
        def read_text(name: str) -> str:
            return "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-macosx_15_0_arm64\n"

    monkeypatch.setattr(mlx_wheel, "distribution", lambda name: Installed)
    assert metal_wheel() == "macosx_15_0_arm64"
