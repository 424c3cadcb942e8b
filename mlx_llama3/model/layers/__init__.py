"""The operations inside a block: rotary embedding, attention, and matrix products.

Attention and the products have a second implementation for MLX's CPU backend, which uses all cores.
"""

from mlx_llama3.model.layers.attention import scaled_dot_product_attention
from mlx_llama3.model.layers.packed_linear import PackedLinear
from mlx_llama3.model.layers.rope import Rope, inv_freq_of
from mlx_llama3.model.layers.tiled_linear import TiledEmbedding, TiledLinear

__all__ = [
    "PackedLinear",
    "Rope",
    "TiledEmbedding",
    "TiledLinear",
    "inv_freq_of",
    "scaled_dot_product_attention",
]
