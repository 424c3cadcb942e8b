"""From a model folder to a `Transformer`: `config.json`, the tensors by their Hugging Face names, and loading them.

Every `mlx-community` Llama 3 folder is one, and so is what `mlx-llama3 convert` writes.
"""

from mlx_llama3.checkpoint.folder import Checkpoint, CheckpointError, Quantization
from mlx_llama3.checkpoint.loading import load_model

__all__ = ["Checkpoint", "CheckpointError", "Quantization", "load_model"]
