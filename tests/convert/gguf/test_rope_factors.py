"""RoPE factors to and from Llama 3.1's formula. Expected: the formula in Python floats, as llama.cpp writes it."""

import math
from dataclasses import replace

import numpy as np
import pytest

from convert.gguf.reader import GGUFError
from convert.gguf.rope_factors import rope_factors, scaling_from_factors
from mlx_llama3.model.config import ModelArgs, RopeScaling

ARGS = ModelArgs(
    dim=64, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=128, hidden_dim=64, vocab_size=10, norm_eps=1e-5,
    rope_theta=500_000.0, max_seq_len=131_072,
)  # fmt: skip


def expected_factors(head_dim: int, scaling: RopeScaling, theta: float = 500_000.0) -> np.ndarray:
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < scaling.original_max_position / scaling.high_freq_factor:
            factors.append(1.0)
        elif wavelength > scaling.original_max_position / scaling.low_freq_factor:
            factors.append(scaling.factor)
        else:
            smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(factors, np.float32)


SCALINGS = [
    RopeScaling(8.0),
    RopeScaling(32.0),
    RopeScaling(16.0, low_freq_factor=1.0, high_freq_factor=8.0),
    RopeScaling(4.0, low_freq_factor=2.0, high_freq_factor=5.0),
]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_numbers_are_found_from_the_tensor(scaling, head_dim):
    args = replace(ARGS, head_dim=head_dim)
    scaling_back = scaling_from_factors(expected_factors(head_dim, scaling), args, 8192, "file")
    assert scaling_back.factor == scaling.factor
    assert scaling_back.low_freq_factor == pytest.approx(scaling.low_freq_factor, abs=2e-3)
    assert scaling_back.high_freq_factor == pytest.approx(scaling.high_freq_factor, abs=2e-3)
    assert scaling_back.original_max_position == 8192


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_tensor_from_the_numbers(factor, head_dim):
    args = replace(ARGS, head_dim=head_dim, rope_scaling=RopeScaling(factor))
    factors = rope_factors(args)
    assert factors.dtype == np.float32
    np.testing.assert_allclose(factors, expected_factors(head_dim, args.rope_scaling), rtol=2e-5)
    assert scaling_from_factors(factors, args, 8192, "file") == args.rope_scaling


def test_ones_mean_no_scaling():
    np.testing.assert_array_equal(rope_factors(ARGS), np.ones(64, np.float32))
    assert scaling_from_factors(np.ones(64, np.float32), ARGS, 8192, "file") is None


@pytest.mark.parametrize(
    "factors",
    [
        np.full(64, 4.0),  # linear scaling
        np.linspace(1, 8, 64),
        np.linspace(8, 1.5, 64),
        expected_factors(128, RopeScaling(8.0)) * np.where(np.arange(64) == 40, 1.01, 1),
    ],
)
def test_other_scalings_are_refused(factors):
    with pytest.raises(GGUFError, match="file: rope_freqs.weight does not follow"):
        scaling_from_factors(factors.astype(np.float32), ARGS, 8192, "file")


@pytest.mark.parametrize("factors", [np.ones(32), np.full(64, np.nan), np.zeros(64), -np.ones(64)])
def test_impossible_factors_are_refused(factors):
    with pytest.raises(GGUFError, match="must hold 64 positive numbers"):
        scaling_from_factors(factors.astype(np.float32), ARGS, 8192, "file")
