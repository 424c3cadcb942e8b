"""The Llama 3 Transformer: its configuration, its blocks, and the residual stream that runs through them.

Below it lie the layers, the Metal kernels, the caches of keys and values, and the hooks that look into a running model.
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
