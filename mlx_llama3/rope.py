"""Rotary position embeddings (RoPE, arXiv 2104.09864) with Llama 3.1's scaling, in the half-split layout of HF.

The half-split layout pairs element i of a head with element i + head_dim/2; Meta's own files pair 2i with 2i + 1. The
converter permutes the rows of wq and wk once, so that both rotate the same numbers.
"""

import math

import mlx.core as mx

from mlx_llama3.config import ModelArgs, RopeScaling

# Periods `(head_dim / 2,)`, or a table (cos, sin) of the pass's positions.
Freqs = mx.array | tuple[mx.array, mx.array]


def inverse_frequencies(args: ModelArgs) -> mx.array:
    """Angle per position of each pair, radians: float32 `(head_dim / 2,)`.

    Source: Meta `models/llama3/model.py`, `precompute_freqs_cis` and `apply_scaling`; float32 as there.
    """
    exponents = mx.arange(0, args.head_dim, 2, dtype=mx.float32) / args.head_dim
    inverse = 1.0 / args.rope_theta**exponents
    return inverse if args.rope_scaling is None else _scale(inverse, args.rope_scaling)


def _scale(inverse: mx.array, scaling: RopeScaling) -> mx.array:
    wavelength = 2 * math.pi / inverse
    # 0 for wavelengths that are stretched wholly, 1 for those that are kept, linear in the frequency between.
    smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = mx.clip(smooth, 0, 1)
    return (1 - smooth) * inverse / scaling.factor + smooth * inverse


class Rope:
    """The rotation of one forward pass: made once, applied to the queries and keys of every layer."""

    def __init__(self, args: ModelArgs) -> None:
        self._inverse = inverse_frequencies(args)
        # What mx.fast.rope takes: the reciprocal, positions per radian.
        self.periods = 1.0 / self._inverse
        mx.eval(self._inverse, self.periods)

    def frequencies(self, start_pos: int, length: int) -> Freqs:
        """What `rotate` needs for positions `start_pos ... start_pos + length - 1`.

        On the GPU the periods, for the fused `mx.fast.rope`. The CPU backend takes that apart into a dozen operations a
        call, sines included; there it is the table, made once and shared by all layers.
        """
        return self.periods if mx.default_device() == mx.gpu else self.table(start_pos, length)

    def table(self, start_pos: int, length: int) -> tuple[mx.array, mx.array]:
        """Cosine and sine of each position's angles, float32 `(length, head_dim / 2)` each."""
        positions = mx.arange(start_pos, start_pos + length, dtype=mx.float32)
        angles = positions[:, None] * self._inverse
        return mx.cos(angles), mx.sin(angles)


def rotate(x: mx.array, start_pos: int, freqs: Freqs) -> mx.array:
    """Rotate queries or keys `(B, heads, S, head_dim)` to their positions; same shape and dtype."""
    if isinstance(freqs, mx.array):
        return mx.fast.rope(x, x.shape[-1], traditional=False, base=None, scale=1.0, offset=start_pos, freqs=freqs)
    cos, sin = freqs
    a, b = mx.split(x, 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
