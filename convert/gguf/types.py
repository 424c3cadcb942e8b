"""The tensor types of GGUF: their numbers, and the byte layout of one block of each type that is read here.

Layouts after llama.cpp `ggml/src/ggml-common.h` (`block_q4_0` ... `block_q6_K`), numbers after `ggml.h` (`ggml_type`).
"""

from dataclasses import dataclass

import numpy as np

# All types, also those that are not read, so that error messages can name them.
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
TYPE_NUMBERS = {name: number for number, name in TYPE_NAMES.items()}


@dataclass(frozen=True)
class Layout:
    """One block of a type: how many values it holds along a row, and its fields."""

    values: int
    fields: np.dtype

    @property
    def n_bytes(self) -> int:
        """Bytes of one block."""
        return self.fields.itemsize


def _block(values: int, *fields: tuple) -> Layout:
    return Layout(values, np.dtype(list(fields)))


# d: scale (float16); m, dmin: minimum or its scale; qs: low bits; qh, hmask: high bits; scales: packed group scales.
_D, _M, _DMIN = ("d", "<f2"), ("m", "<f2"), ("dmin", "<f2")
LAYOUTS = {
    "F32": Layout(1, np.dtype("<f4")),
    "F16": Layout(1, np.dtype("<f2")),
    "BF16": Layout(1, np.dtype("<u2")),
    "Q4_0": _block(32, _D, ("qs", "u1", 16)),
    "Q4_1": _block(32, _D, _M, ("qs", "u1", 16)),
    "Q5_0": _block(32, _D, ("qh", "u1", 4), ("qs", "u1", 16)),
    "Q5_1": _block(32, _D, _M, ("qh", "u1", 4), ("qs", "u1", 16)),
    "Q8_0": _block(32, _D, ("qs", "u1", 32)),
    "Q2_K": _block(256, ("scales", "u1", 16), ("qs", "u1", 64), _D, _DMIN),
    "Q3_K": _block(256, ("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), _D),
    "Q4_K": _block(256, _D, _DMIN, ("scales", "u1", 12), ("qs", "u1", 128)),
    "Q5_K": _block(256, _D, _DMIN, ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)),
    "Q6_K": _block(256, ("qs", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D),
}
