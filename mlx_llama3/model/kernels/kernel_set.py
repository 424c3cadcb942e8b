"""The choice of fused kernels for a model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernels:
    """Which operations of a model run as fused kernels; the others run as their references."""

    add_rms_norm: bool = False
    rope_qkv: bool = False
    swiglu_qmv: bool = False
    sdpa_quantized: bool = False


REFERENCE = Kernels()
FUSED = Kernels(add_rms_norm=True, rope_qkv=True, swiglu_qmv=True, sdpa_quantized=True)
