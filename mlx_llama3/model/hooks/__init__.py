"""Hooks into a running model: taps that read activations, live norms, and edits that change activations.

Each makes a copy that shares the model's weights, so the model itself never changes.
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
