"""Speculative decoding: a drafter proposes the next tokens, and one forward pass of the model verifies them all.

The output is the same as without a draft, also for sampling with a seed.
"""

from mlx_llama3.generation.speculative.drafters import Drafter, ModelDrafter, NgramDrafter
from mlx_llama3.generation.speculative.speculation import Speculation

__all__ = ["Drafter", "ModelDrafter", "NgramDrafter", "Speculation"]
