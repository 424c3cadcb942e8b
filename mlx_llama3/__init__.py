"""Llama 3 on Apple's MLX: the model, its tokenizer, generation and interpretability.

model, tokenizer = mlx_llama3.load("demo")
ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
for step in mlx_llama3.generate(model, tokenizer, ids, max_tokens=48):
    print(step.text, end="")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlx_llama3.system.blas import use_openblas

if TYPE_CHECKING:
    from mlx_llama3 import trace as trace
    from mlx_llama3.api import load as load, load_draft as load_draft
    from mlx_llama3.checkpoint.loading import load_model as load_model
    from mlx_llama3.conversation.conversation import Conversation as Conversation
    from mlx_llama3.errors import UserError as UserError
    from mlx_llama3.generation.sampling import Sampling as Sampling
    from mlx_llama3.generation.stream import Step as Step, generate as generate
    from mlx_llama3.tokenizer.tokenizer import load_tokenizer as load_tokenizer

__version__ = "0.1.0"

use_openblas()  # before anything imports mlx.core

# Names are imported on first use, so that `mlx-llama3 --help` and the error classes do not import MLX.
_MODULES = {
    "Conversation": "conversation.conversation",
    "Sampling": "generation.sampling",
    "Step": "generation.stream",
    "UserError": "errors",
    "generate": "generation.stream",
    "load": "api",
    "load_draft": "api",
    "load_model": "checkpoint.loading",
    "load_tokenizer": "tokenizer.tokenizer",
}
__all__ = [*_MODULES, "trace"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mlx_llama3' has no attribute {name!r}")
    if name == "trace":
        return import_module("mlx_llama3.trace")
    return getattr(import_module(f"mlx_llama3.{_MODULES[name]}"), name)
