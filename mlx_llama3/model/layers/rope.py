"""Rotary position embeddings (RoPE, arXiv 2104.09864) with Llama 3.1's scaling, in the half-split layout of HF.

The half-split layout pairs element i of a head with element i + head_dim/2; Meta's own files pair 2i with 2i + 1. The
converter permutes the rows of wq and wk, so that both layouts rotate the same numbers.
"""

import math
from dataclasses import dataclass, replace

from mlx_llama3.model.config import ModelArgs, RopeScaling

import mlx.core as mx

# The position of a pass's first token: one for all sequences, or `(B,)` int32, one for each sequence.
StartPos = int | mx.array


@dataclass(frozen=True)
class RopeTables:
    """The rotation angles of one pass, in the forms that the kernels and the CPU need.

    offset: position of the first token, int32 `()`, or `(B,)` if each sequence has its own. It is an array, not a
        constant, so that a kernel or graph compiled for one position serves all others.
    inv_freq: angle per position of each pair, radians, float32 `(head_dim / 2,)`.
    periods: the reciprocal of `inv_freq`, as `mx.fast.rope` takes it.
    table: cosine and sine of all angles of the pass, float32 `(S, head_dim / 2)` or `(B, 1, S, head_dim / 2)` each;
        None if a kernel computes them.
    rotation_matrix: for a single position on the CPU, the rotation as a matrix, float32 `(head_dim, head_dim)`, which
        takes one operation instead of nine; else None.
    """

    offset: mx.array
    inv_freq: mx.array
    periods: mx.array
    table: tuple[mx.array, mx.array] | None = None
    rotation_matrix: mx.array | None = None


def inv_freq_of(args: ModelArgs) -> mx.array:
    """Angle per position of each pair, radians: float32 `(head_dim / 2,)`.

    Source: Meta `models/llama3/model.py`, `precompute_freqs_cis` and `apply_scaling`; float32 as there.
    """
    exponents = mx.arange(0, args.head_dim, 2, dtype=mx.float32) / args.head_dim
    inv_freq = 1.0 / args.rope_theta**exponents
    return inv_freq if args.rope_scaling is None else _scale(inv_freq, args.rope_scaling)


def _scale(inv_freq: mx.array, scaling: RopeScaling) -> mx.array:
    wavelength = 2 * math.pi / inv_freq
    # 0 for wavelengths that are scaled in full, 1 for those that stay as they are, linear in the frequency between.
    smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = mx.clip(smooth, 0, 1)
    return (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq


class Rope:
    """Makes the `RopeTables` of a pass, which the queries and keys of all layers share."""

    def __init__(self, args: ModelArgs) -> None:
        self._inv_freq = inv_freq_of(args)
        self.periods = 1.0 / self._inv_freq  # positions per radian, as `mx.fast.rope` takes it
        mx.eval(self._inv_freq, self.periods)

    def frequencies(self, start_pos: StartPos, length: int, *, table: bool | None = None) -> RopeTables:
        """The tables for positions `start_pos ... start_pos + length - 1`, as `rotate` takes them.

        Fused GPU kernels compute the sines themselves. MLX's CPU backend runs `mx.fast.rope` as a dozen operations a
        call, sines included; there a table of them is made once and shared by all layers.

        Args:
            start_pos: one for all sequences, or `(B,)` int32, one for each.
            table: whether to make a table; None: only on the CPU.
        """
        offset = start_pos if isinstance(start_pos, mx.array) else mx.array(start_pos)
        freqs = RopeTables(offset, self._inv_freq, self.periods)
        if mx.default_device() == mx.gpu if table is None else not table:
            return freqs
        cos, sin = self._table(start_pos, length)
        rotation_matrix = self._rotation_matrix(cos, sin) if cos.shape == (1, self._inv_freq.size) else None
        return replace(freqs, table=(cos, sin), rotation_matrix=rotation_matrix)

    def _table(self, start_pos: StartPos, length: int) -> tuple[mx.array, mx.array]:
        positions = mx.arange(length, dtype=mx.float32)
        if isinstance(start_pos, mx.array):
            start_pos = start_pos.astype(mx.float32)[..., None, None]  # (B, 1, 1)
        positions = start_pos + positions  # (S,) or (B, 1, S)
        angles = positions[..., None] * self._inv_freq
        return mx.cos(angles), mx.sin(angles)

    def _rotation_matrix(self, cos: mx.array, sin: mx.array) -> mx.array:
        """The matrix R with `x @ R` = x rotated by the angles whose cosine and sine `(1, head_dim / 2)` are given."""
        half = self._inv_freq.size
        diagonal, across = mx.eye(2 * half), mx.eye(2 * half, k=half) - mx.eye(2 * half, k=-half)
        return mx.tile(cos, (1, 2)) * diagonal + mx.tile(sin, (1, 2)) * across


def rotate(x: mx.array, start_pos: StartPos, freqs: RopeTables) -> mx.array:
    """Apply RoPE to queries or keys `(B, heads, S, head_dim)`; returns the same shape and dtype."""
    if freqs.table is None:
        options = {"traditional": False, "base": None, "scale": 1.0, "offset": start_pos, "freqs": freqs.periods}
        return mx.fast.rope(x, x.shape[-1], **options)
    if freqs.rotation_matrix is not None and x.dtype == mx.float32:
        return x @ freqs.rotation_matrix
    cos, sin = freqs.table
    a, b = mx.split(x, 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
