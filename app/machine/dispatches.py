"""GPU dispatches of one transformer block for one decoded token, with each fused kernel and with its reference.

The numbers are counted by hand from the code. Views (reshape, transpose, slice, split) cost none, a concatenation
copies each of its inputs, and consecutive elementwise operations are one dispatch, because decoding runs compiled
blocks (`model/compiled.py`). `python -m benchmarks.ledger` counts them from an exported graph.
"""

from dataclasses import dataclass

from mlx_llama3.model.kernels.kernel_set import Kernels, Rows

MLX_LM = 17  # dispatches of mlx-lm's llama, at short contexts


@dataclass(frozen=True)
class Row:
    """One part of the block and its dispatches. kernel: the name of the fused kernel for it, if there is one."""

    part: str
    reference: int
    fused: int
    kernel: str | None = None

    def count(self, kernels: Kernels) -> int:
        """The dispatches with these kernels in use."""
        fused = self.kernel is not None and Rows.ONE in getattr(kernels, self.kernel)
        return self.fused if fused else self.reference


ROWS = (
    Row("two adds and the norms after them", 4, 2, "add_rms_norm"),
    Row("product with wq, wk, wv", 1, 1),
    Row("rotation; keys and values side by side", 3, 1, "rope_qkv"),
    Row("cache write", 1, 2, "double_buffer"),
    Row("attention", 1, 1),
    Row("product with wo", 1, 1),
    Row("products with w1, w3 and SwiGLU", 2, 1, "swiglu_qmv"),
    Row("product with w2", 1, 1),
)


def total(kernels: Kernels) -> int:
    """Dispatches per layer and token with these kernels in use and an unquantized cache."""
    return sum(row.count(kernels) for row in ROWS)
