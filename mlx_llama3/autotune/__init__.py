"""The choice of fused kernels for a loaded model on this machine.

A trial runs each kernel on the model's shapes: it must be correct, and faster than its reference. The decisions are
stored in a file.
"""

from mlx_llama3.autotune.choice import KernelChoice, choose, use_chosen
from mlx_llama3.autotune.decisions import Decision, DecisionFile

__all__ = ["Decision", "DecisionFile", "KernelChoice", "choose", "use_chosen"]
