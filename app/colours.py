"""Perceptually uniform colour scales, computed in OKLab (Ottosson 2020, bottosson.github.io/posts/oklab)."""

from collections.abc import Sequence

import numpy as np

# Stops are (lightness 0 to 1, chroma, hue in degrees). Lightness rises throughout, so the order is visible in grey too.
SEQUENTIAL = ((0.18, 0.05, 285), (0.36, 0.16, 295), (0.55, 0.20, 355), (0.74, 0.17, 50), (0.94, 0.12, 100))
# For signed values: both ends are equally strong, the middle is neutral.
DIVERGING_DARK = ((0.80, 0.13, 235), (0.55, 0.14, 245), (0.22, 0.0, 260), (0.57, 0.17, 35), (0.82, 0.13, 65))
DIVERGING_LIGHT = ((0.42, 0.14, 255), (0.68, 0.12, 240), (0.96, 0.0, 260), (0.70, 0.15, 50), (0.45, 0.16, 30))

_TO_LMS = np.array(
    [
        [1.0, 0.3963377774, 0.2158037573],
        [1.0, -0.1055613458, -0.0638541728],
        [1.0, -0.0894841775, -1.2914855480],
    ]
)
_TO_RGB = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)


def ramp(stops: Sequence[tuple[float, float, float]] = SEQUENTIAL, count: int = 256) -> np.ndarray:
    """`count` colours from the first stop to the last at equal OKLab distances: uint8 sRGB `(count, 3)`."""
    lightness, chroma, hue = np.array(stops).T
    angle = np.radians(hue)
    points = np.stack([lightness, chroma * np.cos(angle), chroma * np.sin(angle)], axis=-1)  # (stops, 3) in OKLab
    distances = np.concatenate([[0], np.linalg.norm(np.diff(points, axis=0), axis=-1).cumsum()])
    samples = np.linspace(0, distances[-1], count)
    return srgb(np.stack([np.interp(samples, distances, axis) for axis in points.T], axis=-1))


def srgb(lab: np.ndarray) -> np.ndarray:
    """OKLab `(..., 3)` -> uint8 sRGB; colours outside the sRGB gamut are clipped."""
    linear = np.clip((lab @ _TO_LMS.T) ** 3 @ _TO_RGB.T, 0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return (encoded * 255).round().astype(np.uint8)


def terminal_ramp(count: int = 24) -> list[int]:
    """The indices of the terminal's 256-colour palette that are nearest to `ramp(count)`."""
    steps = np.array([0, 95, 135, 175, 215, 255])
    cube = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), axis=-1).reshape(-1, 3)
    grey = np.repeat(np.arange(8, 248, 10)[:, None], 3, axis=1)
    palette = np.concatenate([cube, grey])
    distance = ((ramp(count=count).astype(int)[:, None] - palette[None]) ** 2).sum(-1)
    return (16 + distance.argmin(-1)).tolist()
