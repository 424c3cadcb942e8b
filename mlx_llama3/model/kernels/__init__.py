"""Fused Metal kernels, one a file. Each has a reference in plain MLX with the same signature.

The reference runs where there is no Metal, for shapes and dtypes that the kernel does not take, and where the trial on
this machine measured the kernel as slower or wrong (`mlx_llama3/autotune`).
"""

from mlx_llama3.model.kernels.kernel_set import FUSED, REFERENCE, Kernels, Rows

__all__ = ["FUSED", "REFERENCE", "Kernels", "Rows"]
