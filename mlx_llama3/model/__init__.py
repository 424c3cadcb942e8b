"""The Llama 3 Transformer: configuration, blocks, and the residual stream.

The packages inside hold its layers, the fused Metal kernels, the KV caches, and hooks that read or edit activations.
"""

from mlx_llama3.model.config import ConfigError, ModelArgs, RopeScaling
from mlx_llama3.model.residual import Residual
from mlx_llama3.model.transformer import Attention, FeedForward, RMSNorm, Transformer, TransformerBlock

__all__ = [
    "Attention",
    "ConfigError",
    "FeedForward",
    "ModelArgs",
    "RMSNorm",
    "Residual",
    "RopeScaling",
    "Transformer",
    "TransformerBlock",
]
