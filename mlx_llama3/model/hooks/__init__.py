"""Ways to look into a running model, or to change it: taps, live norms, what-if edits.

Each works on a copy that shares the model's weights, so the model itself is never changed.
"""

from mlx_llama3.model.hooks.edits import Add, Edit, Scale, edited
from mlx_llama3.model.hooks.norms import POINTS, NormCapture
from mlx_llama3.model.hooks.taps import Hook, tapped

__all__ = [
    "POINTS",
    "Add",
    "Edit",
    "Hook",
    "NormCapture",
    "Scale",
    "edited",
    "tapped",
]
