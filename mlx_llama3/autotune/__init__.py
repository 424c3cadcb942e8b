"""Which fused kernels serve a loaded model on this machine.

Each one is tried for the model's shapes: it must be right, and faster than its reference. Decisions are kept in a file.
"""

from mlx_llama3.autotune.choice import KernelChoice, choose, use_chosen
from mlx_llama3.autotune.decisions import Decision, DecisionFile

__all__ = ["Decision", "DecisionFile", "KernelChoice", "choose", "use_chosen"]
