"""Quantizes float32 rows to GGUF's F16, Q8_0 and Q4_1, rounded like ggml's reference.

llama.cpp `ggml/src/ggml-quants.c`, `quantize_row_q8_0_ref` and `quantize_row_q4_1_ref`.
"""

import numpy as np

from convert.gguf.dequantize import CHUNK_VALUES, extremes
from convert.gguf.types import LAYOUTS

TYPES = ("F16", "Q8_0", "Q4_1")
_GROUP = 32


def quantize(values: np.ndarray, type_name: str) -> np.ndarray:
    """Pack float32 rows (rows, columns) as stored rows: uint8 (rows, row bytes).

    Columns must be a multiple of the type's block (32). Values that are not finite or beyond the range of float16
    give values or scales that are not finite; the caller must check for them.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if type_name == "F16":
            return values.astype("<f2").view(np.uint8)
        groups, fill = values.reshape(-1, _GROUP), _fill_q8_0 if type_name == "Q8_0" else _fill_q4_1
        blocks = np.empty(len(groups), LAYOUTS[type_name].fields)
        step = CHUNK_VALUES // _GROUP
        for start in range(0, len(groups), step):
            fill(blocks[start : start + step], groups[start : start + step])
    return blocks.view(np.uint8).reshape(len(values), -1)


def repack_q4_1(weight: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> np.ndarray | None:
    """Repack MLX's 4-bit affine rows as Q4_1 without changing a value.

    Args:
        weight: uint32 (rows, columns / 8).
        scales, biases: float32 (rows, columns / group size); a group of 64 or 128 becomes blocks of 32 that share them.

    Returns:
        Stored rows, uint8 (rows, row bytes); None if float16 does not hold every scale and bias exactly.
    """
    rows, n_blocks = weight.shape[0], weight.size // 4
    repeats = weight.shape[1] // 4 // scales.shape[1]
    blocks = np.empty(n_blocks, LAYOUTS["Q4_1"].fields)
    with np.errstate(over="ignore"):
        blocks["d"], blocks["m"] = (np.repeat(array, repeats, axis=1).reshape(-1) for array in (scales, biases))
        exact = np.array_equal(blocks["d"].reshape(rows, -1)[:, ::repeats], scales)
        exact = exact and np.array_equal(blocks["m"].reshape(rows, -1)[:, ::repeats], biases)
    if not exact:
        return None
    # A byte of MLX holds two neighbours, a byte of Q4_1 two values that are 16 apart.
    pairs = weight.view(np.uint8).reshape(-1, 16)
    q = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(-1, 2, 16)
    blocks["qs"] = q[:, 0] | (q[:, 1] << np.uint8(4))
    return blocks.view(np.uint8).reshape(rows, -1)


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)[:, None]


def _fill_q8_0(blocks: np.ndarray, groups: np.ndarray) -> None:
    low, high = extremes(groups)
    scale = np.abs(np.maximum(-low, high)) / np.float32(127)
    scaled = groups * _inverse(scale)
    # Halves round away from zero as in ggml; np.rint would round them to even.
    q = np.trunc(scaled)
    q += np.trunc(2 * (scaled - q))
    blocks["d"] = scale
    blocks["qs"] = q.astype(np.int8).view(np.uint8)


def _fill_q4_1(blocks: np.ndarray, groups: np.ndarray) -> None:
    low, high = extremes(groups)
    scale = (high - low) / np.float32(15)
    scaled = (groups - low[:, None]) * _inverse(scale) + np.float32(0.5)
    q = np.minimum(scaled.astype(np.uint8), 15)
    blocks["d"], blocks["m"] = scale, low
    blocks["qs"] = q[:, :16] | (q[:, 16:] << np.uint8(4))
