"""Which fused kernels serve a loaded model on this machine.

Each one is tried for the model's shapes: it must be right, and faster than its reference. Decisions are kept in a file.
"""

from mlx_llama3.autotune.choice import Choice, choose, use_chosen
from mlx_llama3.autotune.decisions import Decision, DecisionFile

__all__ = [
    "Choice",
    "Decision",
    "DecisionFile",
    "choose",
    "use_chosen",
]
