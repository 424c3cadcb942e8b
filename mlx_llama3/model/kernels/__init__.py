"""Fused Metal kernels, one a file, each beside its reference in plain MLX with the same signature.

The reference serves where there is no Metal, for shapes and types that the kernel does not take, and wherever the trial
on this machine found the kernel slower or wrong (`mlx_llama3/autotune`).
"""

from mlx_llama3.model.kernels.kernel_set import FUSED, REFERENCE, Kernels

__all__ = ["FUSED", "REFERENCE", "Kernels"]
