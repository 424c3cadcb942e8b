"""The parts of a block that are not the block: rotary embedding, attention, and matrix products.

Some have a second form for MLX's CPU backend, which computes the same and uses all cores.
"""

from mlx_llama3.model.layers.attention import attend
from mlx_llama3.model.layers.packed_linear import PackedLinear
from mlx_llama3.model.layers.rope import Rope, inverse_frequencies
from mlx_llama3.model.layers.tiled_linear import SpreadEmbedding, SpreadLinear

__all__ = [
    "PackedLinear",
    "Rope",
    "SpreadEmbedding",
    "SpreadLinear",
    "attend",
    "inverse_frequencies",
]
