"""RoPE scaling in GGUF: one divisor per frequency, instead of the four parameters of Llama 3.1's formula.

llama.cpp writes `rope_freqs.weight`, (head_dim / 2,) float32, by which the unscaled inverse frequencies are divided
(`convert_hf_to_gguf.py`, `LlamaModel.generate_extra_tensors`).
"""

import math
from dataclasses import replace

import numpy as np

from convert.gguf.reader import GGUFError
from mlx_llama3.model.config import ModelArgs, RopeScaling
from mlx_llama3.model.layers.rope import inv_freq_of

ORIGINAL_MAX_POSITION = 8192
TOLERANCE = 1e-4


def rope_factors(args: ModelArgs) -> np.ndarray:
    """`rope_freqs.weight` for a model: float32 (head_dim / 2,), all 1 without scaling."""
    plain = inv_freq_of(replace(args, rope_scaling=None))
    return np.array(plain / inv_freq_of(args))


def scaling_from_factors(factors: np.ndarray, args: ModelArgs, original: int, source: str) -> RopeScaling | None:
    """The parameters of Llama 3.1's formula that give `factors`; None if these are all 1.

    Args:
        factors: `rope_freqs.weight`, float32 (head_dim / 2,).
        args: the model; its `rope_scaling` is ignored.
        original: the context length before scaling. It cannot be derived from the tensor alone.
        source: the file, for messages.

    Raises:
        GGUFError: the shape is wrong, a factor is not positive and finite, or no parameters give this tensor.
    """
    if factors.shape != (args.head_dim // 2,) or not np.all(np.isfinite(factors)) or np.any(factors <= 0):
        raise GGUFError(f"{source}: rope_freqs.weight must hold {args.head_dim // 2} positive numbers")
    if np.allclose(factors, 1, rtol=TOLERANCE, atol=0):
        return None
    # The longest wavelength has the full factor.
    scaling = RopeScaling(float(factors[-1]), original_max_position=original)
    for candidate in (scaling, _fit(factors, args, scaling)):
        candidate_args = replace(args, rope_scaling=candidate)
        if candidate is not None and np.allclose(rope_factors(candidate_args), factors, rtol=TOLERANCE, atol=0):
            return candidate
    raise GGUFError(
        f"{source}: rope_freqs.weight does not follow Llama 3.1's formula; this RoPE scaling is not supported"
    )


def _fit(factors: np.ndarray, args: ModelArgs, scaling: RopeScaling) -> RopeScaling | None:
    """Fit the low and high frequency factors to the interpolated divisors; None if there are fewer than two.

    For these, 1 / divisor = (1 - s) / factor + s, and s = (original / wavelength - low) / (high - low) is linear in
    1 / wavelength.
    """
    between = (factors > 1 + TOLERANCE) & (factors < scaling.factor * (1 - TOLERANCE))
    if np.count_nonzero(between) < 2:
        return None
    inverse = np.array(inv_freq_of(replace(args, rope_scaling=None)), np.float64)[between]
    smooth = (1 / factors[between].astype(np.float64) - 1 / scaling.factor) / (1 - 1 / scaling.factor)
    slope, at_zero = np.polyfit(inverse / (2 * math.pi), smooth, 1)
    if slope <= 0 or at_zero >= 0:
        return None
    width = scaling.original_max_position / slope
    low = round(-at_zero * width, 3)
    return replace(scaling, low_freq_factor=low, high_freq_factor=round(low + width, 3))
