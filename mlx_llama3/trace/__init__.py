"""Interpretability: norms during generation, the state of any position, lenses, what-if edits, and saved traces.

Every tool wraps the modules of the model; the model itself is not changed, and its code is not duplicated.

trace = mlx_llama3.trace.run(model, tokenizer, ids, max_tokens=40, save=("residuals", "logits"))
trace.save(Path("t.safetensors")); trace = mlx_llama3.trace.load_trace(Path("t.safetensors"))
"""

from mlx_llama3.model.hooks.edits import Add, Scale, edited
from mlx_llama3.trace.position import look
from mlx_llama3.trace.running import run
from mlx_llama3.trace.store import Trace, load_trace

__all__ = ["Add", "Scale", "Trace", "edited", "load_trace", "look", "run"]
