"""Speculative decoding: a drafter guesses the next tokens, and one pass of the model checks them all.

The tokens are the same as without a draft, sampled ones with a seed too.
"""

from mlx_llama3.generation.speculative.drafters import Drafter, ModelDrafter, NgramDrafter
from mlx_llama3.generation.speculative.speculation import Speculation

__all__ = ["Drafter", "ModelDrafter", "NgramDrafter", "Speculation"]
