"""From a model folder to a `Transformer`: `config.json`, the tensors by their Hugging Face names, and loading.

A model folder is any `mlx-community` Llama 3 repository, or what `mlx-llama3 convert` writes.
"""

from mlx_llama3.checkpoint.folder import Checkpoint, CheckpointError
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.checkpoint.quantization import Quantization

__all__ = ["Checkpoint", "CheckpointError", "Quantization", "load_model"]
