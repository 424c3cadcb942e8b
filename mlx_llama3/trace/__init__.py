"""A look inside: live norms while generating, views on demand, what-if edits, saved traces.

Every view is a wrapper around the modules of the one model, which is never changed and is not written twice.

trace = mlx_llama3.trace.run(model, tokenizer, ids, max_tokens=40, save=("residuals", "logits"))
trace.save(Path("t.safetensors")); trace = mlx_llama3.trace.load_trace(Path("t.safetensors"))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_llama3.trace.edits import Add, Scale, edited
    from mlx_llama3.trace.position import look
    from mlx_llama3.trace.running import run
    from mlx_llama3.trace.store import Trace, load_trace

__all__ = ["Add", "Scale", "Trace", "edited", "load_trace", "look", "run"]

# Looked up on first use: plain generation imports parts of this package and needs no more of it.
_HOMES = {
    "Add": "edits",
    "Scale": "edits",
    "Trace": "store",
    "edited": "edits",
    "load_trace": "store",
    "look": "position",
    "run": "running",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mlx_llama3.trace' has no attribute {name!r}")
    return getattr(import_module(f"mlx_llama3.trace.{_HOMES[name]}"), name)
