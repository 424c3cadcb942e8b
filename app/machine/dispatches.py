"""GPU dispatches of one transformer block for one decoded token, with each fused kernel and with its reference.

The numbers are counted by hand from the code. Views (reshape, transpose, slice, split) cost none, a concatenation
copies each of its inputs, and consecutive elementwise operations are one dispatch, because decoding runs compiled
blocks (`model/compiled.py`). `python -m benchmarks.ledger` counts them from an exported graph.
"""

from dataclasses import dataclass

from mlx_llama3.model.kernels.kernel_set import Kernels

MLX_LM = 17  # dispatches of mlx-lm's llama, at short contexts


@dataclass(frozen=True)
class Row:
    """One part of the block and its dispatches.

    kernels: the names of the fused kernels that compute it, if there are any. within: a kernel that computes it as a
    part of the next row's dispatch, or of that of the row before.
    """

    part: str
    reference: int
    fused: int
    kernels: tuple[str, ...] = ()
    within: str | None = None

    def count(self, kernels: Kernels) -> int:
        """The dispatches with these kernels in use."""
        used = kernels.at(1)
        if self.within in used:
            return 0
        return self.reference if used.isdisjoint(self.kernels) else self.fused


ROWS = (
    Row("add, and the norm before attention", 2, 1, ("add_rms_norm",), within="norm_rope_qkv"),
    Row("product with wq, wk, wv", 1, 1),
    Row("rotation; keys and values side by side", 3, 1, ("rope_qkv",), within="norm_rope_qkv"),
    Row("cache write", 1, 2, ("double_buffer",)),
    Row("attention", 1, 1),
    Row("product with wo", 1, 1),
    Row("add, and the norm before the feed-forward", 2, 1, ("add_rms_norm",), within="norm_swiglu_qmv"),
    Row("products with w1, w3 and SwiGLU", 2, 1, ("swiglu_qmv", "norm_swiglu_qmv")),
    Row("product with w2", 1, 1),
)


def total(kernels: Kernels) -> int:
    """Dispatches per layer and token with these kernels in use and an unquantized cache."""
    return sum(row.count(kernels) for row in ROWS)
