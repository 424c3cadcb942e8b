"""What a layer asks of the GPU for one decoded token: dispatches, with each kernel and with its reference.

Counted from the code: views (reshape, transpose, slice, split) cost none, putting arrays side by side copies each of
them, and elementwise operations that follow one another are one, because decoding is recorded (`recorded.py`).
`python -m benchmarks.ledger` counts them in a recorded graph.
"""

from dataclasses import dataclass

from mlx_llama3.model.kernels.kernel_set import Kernels

MLX_LM = 17  # of mlx-lm's llama, at short contexts


@dataclass(frozen=True)
class Row:
    """A part of the layer. kernel: the name of the one that may serve in it, if there is one."""

    part: str
    reference: int
    fused: int
    kernel: str | None = None

    def count(self, kernels: Kernels) -> int:
        """Dispatches when these kernels serve."""
        return self.fused if self.kernel is not None and getattr(kernels, self.kernel) else self.reference


ROWS = (
    Row("two adds and the norms after them", 4, 2, "add_rms_norm"),
    Row("product with wq, wk, wv", 1, 1),
    Row("rotation; keys and values side by side", 3, 1, "rope_qkv"),
    Row("cache write", 1, 1),
    Row("attention", 1, 1),
    Row("product with wo", 1, 1),
    Row("products with w1, w3 and SwiGLU", 2, 1, "swiglu_qmv"),
    Row("product with w2", 1, 1),
)


def total(kernels: Kernels) -> int:
    """Dispatches a layer a token when these kernels serve, with the cache in full precision."""
    return sum(row.count(kernels) for row in ROWS)
