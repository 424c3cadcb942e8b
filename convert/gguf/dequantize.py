"""Dequantizes GGUF's blocks to float32, or repacks them as MLX affine groups without changing a value.

All types encode w = scale * (q - zero) + bias, with small integers q in groups that share scale and bias. `_UNPACK`
reads each type's packing into this form. `dequantize` evaluates it, with the operations in ggml's order, so that every
bit agrees. `to_affine` writes it in MLX's packing, w = scale * q + (bias - scale * zero).

MLX has groups of 32 with 4, 5 or 8 bits, so Q4_0, Q4_1, Q4_K (4 bits), Q5_0, Q5_1, Q5_K (5) and Q8_0 (8) fit. Q2_K,
Q3_K and Q6_K have groups of 16, which MLX does not have.
Layouts: llama.cpp `ggml/src/ggml-quants.c`, `dequantize_row_*`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from convert.gguf.types import LAYOUTS

# Values per step, so that the intermediate arrays stay in the processor's cache.
CHUNK_VALUES = 1 << 16

AFFINE_BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q8_0": 8}
AFFINE_GROUP = 32
# Types whose scales are the product of a float16 and a small integer, exact only in float32.
WIDE_SCALES = frozenset({"Q4_K", "Q5_K"})


class Affine(NamedTuple):
    """Rows as `mx.quantize(..., group_size=32)` returns them.

    weight (rows, columns * bits / 32) uint32; scales and biases (rows, columns / 32), float16 or float32.
    """

    weight: np.ndarray
    scales: np.ndarray
    biases: np.ndarray


class _Groups(NamedTuple):
    """Blocks in the form w = scale * (q - zero) + bias.

    q (blocks, groups, group size) uint8; scale and bias (blocks, groups) float32, bias None if the type has none.
    """

    q: np.ndarray
    zero: int
    scale: np.ndarray
    bias: np.ndarray | None


# Scales of a damaged file may be infinite or NaN. The callers check for them, so numpy need not warn.
_NO_WARNINGS = np.errstate(over="ignore", invalid="ignore")


@_NO_WARNINGS
def dequantize(raw: np.ndarray, type_name: str) -> np.ndarray:
    """Dequantize stored rows, (rows, row bytes) uint8, to float32 (rows, columns).

    Bit for bit equal to ggml's reference (and to `gguf.quants.dequantize`). `type_name` is a key of `LAYOUTS`.
    """
    fields = LAYOUTS[type_name].fields
    if type_name == "BF16":
        return (raw.view(fields).astype(np.uint32) << 16).view(np.float32)
    if type_name not in _UNPACK:
        return raw.view(fields).astype(np.float32, copy=False)
    blocks = raw.reshape(-1).view(fields)
    out = np.empty((blocks.size, LAYOUTS[type_name].values), np.float32)
    step = CHUNK_VALUES // LAYOUTS[type_name].values
    for start in range(0, blocks.size, step):
        groups = _UNPACK[type_name](blocks[start : start + step])
        target = out[start : start + step].reshape(groups.q.shape)
        target[:] = (groups.q - np.uint8(groups.zero)).view(np.int8)
        target *= groups.scale[..., None]
        if groups.bias is not None:
            target += groups.bias[..., None]
    return out.reshape(raw.shape[0], -1)


@_NO_WARNINGS
def to_affine(raw: np.ndarray, type_name: str, scale_dtype: type = np.float16) -> Affine:
    """Repack stored rows, (rows, row bytes) uint8, as MLX affine groups of 32; `type_name` is in `AFFINE_BITS`.

    With float32 scales every value equals that of `dequantize`. With float16, the default, so it does for all types but
    those in `WIDE_SCALES`, whose scales and biases are rounded. A bias beyond float16's range becomes infinite; the
    caller must check for it and use float32.
    """
    bits = AFFINE_BITS[type_name]
    rows = raw.shape[0]
    blocks = raw.reshape(-1).view(LAYOUTS[type_name].fields)
    n_groups = LAYOUTS[type_name].values // AFFINE_GROUP
    weight = np.empty((blocks.size, n_groups * bits), np.uint32)
    scales = np.empty((blocks.size, n_groups), scale_dtype)
    biases = np.empty_like(scales)
    step = CHUNK_VALUES // LAYOUTS[type_name].values
    for start in range(0, blocks.size, step):
        chunk = slice(start, start + step)
        groups = _UNPACK[type_name](blocks[chunk])
        weight[chunk] = _pack(groups.q, bits).reshape(-1, n_groups * bits)
        scales[chunk] = groups.scale
        biases[chunk] = -groups.scale * groups.zero if groups.bias is None else groups.bias
    return Affine(weight.reshape(rows, -1), scales.reshape(rows, -1), biases.reshape(rows, -1))


@_NO_WARNINGS
def requantize_8_bit(values: np.ndarray) -> Affine:
    """Quantize float32 (rows, columns) to 8 bits in groups of 32 with float16 scales and biases.

    No value changes by more than half its group's scale: scale and bias are rounded to float16 first, the scale up, and
    the integers are then computed from them. (`mx.quantize` computes the integers first. That loses a third of the
    precision for weights around 1e-3, and most of it below.)
    """
    groups = values.reshape(-1, AFFINE_GROUP)
    q = np.empty(groups.shape, np.uint8)
    scales, biases = np.empty(len(groups), np.float16), np.empty(len(groups), np.float16)
    step = CHUNK_VALUES // AFFINE_GROUP
    for start in range(0, len(groups), step):
        chunk = slice(start, start + step)
        q[chunk], scales[chunk], biases[chunk] = _nearest_8_bit(groups[chunk])
    shape = (values.shape[0], -1)
    return Affine(q.reshape(shape).view("<u4"), scales.reshape(shape), biases.reshape(shape))


def _nearest_8_bit(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    low, high = extremes(groups)
    bias = _round_up(-low)
    scale = _round_up((high + bias) / np.float32(255))
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    q = np.rint((groups + bias[:, None]) * inverse[:, None]).clip(0, 255).astype(np.uint8)
    return q, scale, -bias


def extremes(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Minimum and maximum of every row. Transposed first: numpy reduces across short rows six times as fast."""
    columns = np.ascontiguousarray(groups.T)
    return columns.min(axis=0), columns.max(axis=0)


def _round_up(values: np.ndarray) -> np.ndarray:
    """Round up to float16, returned as float32."""
    near = values.astype(np.float16)
    return np.where(near < values, np.nextafter(near, np.float16(np.inf)), near).astype(np.float32)


def is_finite(raw: np.ndarray, type_name: str) -> bool:
    """Whether stored rows, (rows, row bytes) uint8, are free of NaN and infinity in their values or scales."""
    stored = raw.reshape(-1).view(LAYOUTS[type_name].fields)
    names = stored.dtype.names
    floats = [stored[name] for name in ("d", "m", "dmin") if name in names] if names else [stored]
    return all(bool(np.isfinite(array).all()) for array in floats)


def rounding_error(raw: np.ndarray, type_name: str) -> float:
    """RMS error of stored rows if their scales and biases are rounded to float16, relative to the RMS of the values."""
    groups = _UNPACK[type_name](raw.reshape(-1).view(LAYOUTS[type_name].fields))
    scale, bias = (exact - exact.astype(np.float16).astype(np.float32) for exact in (groups.scale, groups.bias))
    error = groups.q * scale[..., None] + bias[..., None]
    values = dequantize(raw, type_name)
    return float(np.sqrt(np.sum(error**2) / max(np.sum(values**2), np.finfo(np.float32).tiny)))


def _pack(q: np.ndarray, bits: int) -> np.ndarray:
    """Pack uint8 values below 2**bits into one little-endian bit stream; flat uint32."""
    x, used = np.ascontiguousarray(q).reshape(-1), bits
    # Merge neighbours into words of 16, 32, 64 bits until the used bits are whole bytes; then drop the unused bytes.
    while used % 8:
        half = 8 * x.itemsize
        x = x.view(f"<u{2 * x.itemsize}")
        x = (x & ((1 << used) - 1)) | ((x >> half) << used)
        used *= 2
    stream = x.view(np.uint8).reshape(-1, x.itemsize)[:, : used // 8]
    return np.ascontiguousarray(stream).reshape(-1).view("<u4")


def _low_high(qs: np.ndarray, *shape: int) -> np.ndarray:
    """Unpack half bytes (blocks, ..., n) to (blocks, ..., 2, n), low halves first, then reshape to (blocks, *shape)."""
    out = np.empty((*qs.shape[:-1], 2, qs.shape[-1]), np.uint8)
    np.bitwise_and(qs, 15, out=out[..., 0, :])
    np.right_shift(qs, 4, out=out[..., 1, :])
    return out.reshape(qs.shape[0], *shape)


def _bit_planes(qh: np.ndarray, bits: int) -> np.ndarray:
    """Unpack bytes (blocks, ..., n) to (blocks, ..., 8 / bits, n): plane i holds bits from i * bits on of each byte."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (qh[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def _f32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)[:, None]


def _q4_0(blocks: np.ndarray) -> _Groups:
    return _Groups(_low_high(blocks["qs"], 1, 32), 8, _f32(blocks["d"]), None)


def _q4_1(blocks: np.ndarray) -> _Groups:
    return _Groups(_low_high(blocks["qs"], 1, 32), 0, _f32(blocks["d"]), _f32(blocks["m"]))


def _five_bits(blocks: np.ndarray) -> np.ndarray:
    """q of Q5_0 and Q5_1: (blocks, 1, 32); bit i of the four bytes `qh` is the fifth bit of value i."""
    high = np.unpackbits(blocks["qh"], axis=-1, bitorder="little")
    return _low_high(blocks["qs"], 1, 32) | (high << np.uint8(4))[:, None]


def _q5_0(blocks: np.ndarray) -> _Groups:
    return _Groups(_five_bits(blocks), 16, _f32(blocks["d"]), None)


def _q5_1(blocks: np.ndarray) -> _Groups:
    return _Groups(_five_bits(blocks), 0, _f32(blocks["d"]), _f32(blocks["m"]))


def _q8_0(blocks: np.ndarray) -> _Groups:
    return _Groups(blocks["qs"][:, None] ^ np.uint8(128), 128, _f32(blocks["d"]), None)


def _q2_k(blocks: np.ndarray) -> _Groups:
    q = _bit_planes(blocks["qs"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    scale = _f32(blocks["d"]) * (blocks["scales"] & 15).astype(np.float32)
    return _Groups(q, 0, scale, -(_f32(blocks["dmin"]) * (blocks["scales"] >> 4).astype(np.float32)))


def _q3_k(blocks: np.ndarray) -> _Groups:
    # 16 scales of 6 bits: 8 bytes of low halves, then 4 bytes with the two high bits of all.
    packed = blocks["scales"]
    high = _bit_planes(packed[:, 8:], 2).reshape(-1, 16)
    scales = (_low_high(packed[:, :8], 16) | (high << np.uint8(4))).astype(np.float32) - 32
    # Two bits are in `qs`, the third in `hmask`, whose bit planes span the whole block.
    q = _bit_planes(blocks["qs"].reshape(-1, 2, 32), 2).reshape(-1, 256)
    q |= _bit_planes(blocks["hmask"], 1).reshape(-1, 256) << np.uint8(2)
    return _Groups(q.reshape(-1, 16, 16), 4, _f32(blocks["d"]) * scales, None)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 scales and 8 biases of Q4_K and Q5_K, (blocks, 8) each; 12 bytes hold their 6-bit factors of d and dmin."""
    first, second, rest = (blocks["scales"][:, start : start + 4] for start in (0, 4, 8))
    scale = np.concatenate([first & 63, (rest & 15) | ((first >> 2) & 48)], axis=1)
    minimum = np.concatenate([second & 63, (rest >> 4) | ((second >> 2) & 48)], axis=1)
    return _f32(blocks["d"]) * scale.astype(np.float32), -(_f32(blocks["dmin"]) * minimum.astype(np.float32))


def _q4_k(blocks: np.ndarray) -> _Groups:
    return _Groups(_low_high(blocks["qs"].reshape(-1, 4, 32), 8, 32), 0, *_k_scales(blocks))


def _q5_k(blocks: np.ndarray) -> _Groups:
    q = _low_high(blocks["qs"].reshape(-1, 4, 32), 8, 32)
    q |= _bit_planes(blocks["qh"], 1) << np.uint8(4)
    return _Groups(q, 0, *_k_scales(blocks))


def _q6_k(blocks: np.ndarray) -> _Groups:
    q = _low_high(blocks["qs"].reshape(-1, 2, 64), 256)
    q |= _bit_planes(blocks["qh"].reshape(-1, 2, 32), 2).reshape(-1, 256) << np.uint8(4)
    return _Groups(q.reshape(-1, 16, 16), 32, _f32(blocks["d"]) * blocks["scales"].astype(np.float32), None)


_UNPACK: dict[str, Callable[[np.ndarray], _Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
