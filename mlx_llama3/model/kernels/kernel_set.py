"""The choice of fused kernels for a model."""

from dataclasses import dataclass, fields
from enum import Flag, auto
from functools import cache

MOST_FEW = 8


class Rows(Flag):
    """Numbers of rows in one pass: sequences times new positions. A kernel may pay at some of them and not at others.

    A flag is a set of them: `Rows.of(3) in kernels.rope_qkv`.
    """

    NONE = 0
    ONE = auto()  # decoding
    FEW = auto()  # 2 to 8: drafts, and batches
    MANY = auto()  # more: prompts
    ALL = ONE | FEW | MANY

    @classmethod
    def of(cls, count: int) -> "Rows":
        """The flag for `count` rows."""
        return cls.ONE if count == 1 else cls.FEW if count <= MOST_FEW else cls.MANY

    @property
    def label(self) -> str:
        """In words, e.g. `1 row, prompts`."""
        words = {Rows.ONE: "1 row", Rows.FEW: f"2 to {MOST_FEW} rows", Rows.MANY: "prompts"}
        chosen = [word for rows, word in words.items() if rows in self]
        return "all rows" if self == Rows.ALL else ", ".join(chosen) or "none"


@dataclass(frozen=True)
class Kernels:
    """Which operations of a model run as fused kernels, and at which numbers of rows; else their references run.

    double_buffer is no kernel but chosen alike: with `ONE`, the plain cache has two buffers
    (`cache/double_buffered.py`).
    """

    add_rms_norm: Rows = Rows.NONE
    rope_qkv: Rows = Rows.NONE
    swiglu_qmv: Rows = Rows.NONE
    sdpa_quantized: Rows = Rows.NONE
    norm_rope_qkv: Rows = Rows.NONE
    norm_swiglu_qmv: Rows = Rows.NONE
    double_buffer: Rows = Rows.NONE

    def at(self, count: int) -> frozenset[str]:
        """The names of the kernels that run in a pass of `count` rows."""
        return _at(self, Rows.of(count))


@cache
def _at(kernels: Kernels, rows: Rows) -> frozenset[str]:
    return frozenset(name for name in NAMES if rows in getattr(kernels, name))


NAMES = tuple(field.name for field in fields(Kernels))
REFERENCE = Kernels()
FUSED = Kernels(**dict.fromkeys(NAMES, Rows.ALL))

# Those that do a residual add, and so need a stream whose add waits for them (`model/residual.py`).
ADDING = ("add_rms_norm", "norm_rope_qkv", "norm_swiglu_qmv")
