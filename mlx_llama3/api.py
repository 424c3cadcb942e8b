"""`load`: a model and its tokenizer by name."""

import mlx.core as mx

from mlx_llama3.hub import resolve
from mlx_llama3.loading import load_model
from mlx_llama3.model import Transformer
from mlx_llama3.tokenizer import Tokenizer, load_tokenizer


def load(name: str, *, dtype: mx.Dtype | None = None) -> tuple[Transformer, Tokenizer]:
    """Load a model and its tokenizer.

    Args:
        name: a folder, a Hugging Face id ("org/name", downloaded on first use), or an alias: "demo", "llama3.2-1b",
            "llama3.2-3b", "llama3.1-8b", "llama3.3-70b".
        dtype: as in `load_model`.

    Raises:
        UserError: the model is not found, cannot be fetched, or cannot be loaded; one line that says what to do.
    """
    folder = resolve(name)
    tokenizer = load_tokenizer(folder)  # first: a folder without one fails before gigabytes are read
    return load_model(folder, dtype=dtype), tokenizer
