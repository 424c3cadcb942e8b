"""RoPE against float64 and against MLX's own fused rotation."""

import numpy as np
import pytest
from tiny_models import tiny_args

from mlx_llama3.model.config import RopeScaling
from mlx_llama3.model.layers.rope import Rope, inv_freq_of, rotate

import mlx.core as mx


def reference_inv_freq(theta: float, head_dim: int, factor: float | None) -> np.ndarray:
    """Meta's `apply_scaling`, branch by branch, in float64."""
    inv_freq = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    if factor is None:
        return inv_freq
    scaled = []
    for freq in inv_freq:
        wavelength = 2 * np.pi / freq
        if wavelength < 8192 / 4:
            scaled.append(freq)
        elif wavelength > 8192 / 1:
            scaled.append(freq / factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            scaled.append((1 - smooth) * freq / factor + smooth * freq)
    return np.array(scaled)


@pytest.mark.parametrize("factor", [None, 8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_inverse_frequencies(factor, head_dim):
    args = tiny_args(head_dim=head_dim, rope_theta=500000.0, rope_scaling=factor and RopeScaling(factor))
    np.testing.assert_allclose(np.array(inv_freq_of(args)), reference_inv_freq(500000.0, head_dim, factor), rtol=1e-6)


@pytest.mark.parametrize("start", [0, 1, 7, 5000])
@pytest.mark.parametrize("length", [1, 5])
def test_rotation_is_a_complex_product(start, length):
    """Pairs (i, i + d/2) are complex numbers, multiplied by e^(i * position * frequency); in float64."""
    args = tiny_args(head_dim=16, rope_theta=500000.0, rope_scaling=RopeScaling(8.0))
    x = np.random.default_rng(0).standard_normal((2, 3, length, 16)).astype(np.float32)
    angles = np.arange(start, start + length)[:, None] * reference_inv_freq(500000.0, 16, 8.0)
    rotated = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angles)
    freqs = Rope(args).frequencies(start, length)
    result = np.array(rotate(mx.array(x), start, freqs))
    np.testing.assert_allclose(result, np.concatenate([rotated.real, rotated.imag], -1), atol=1e-5 + 2e-7 * start)


def test_composed_and_fused_rotation_agree():
    """The table of sines (CPU) and `mx.fast.rope` with periods (GPU) rotate by the same angles."""
    args = tiny_args(head_dim=32, rope_scaling=RopeScaling(32.0))
    rope, x = Rope(args), mx.random.normal((1, 4, 9, 32), key=mx.random.key(0))
    fused = rotate(x, 300, rope.frequencies(300, 9, table=False))
    composed = rotate(x, 300, rope.frequencies(300, 9, table=True))
    assert mx.abs(fused - composed).max().item() < 2e-4


def test_keeps_dtype():
    rope = Rope(tiny_args())
    x = mx.ones((1, 1, 2, 16), dtype=mx.bfloat16)
    assert rotate(x, 0, rope.frequencies(0, 2, table=True)).dtype == mx.bfloat16
