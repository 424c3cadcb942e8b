"""`load`: a model and its tokenizer by name."""

from pathlib import Path

import mlx.core as mx

from mlx_llama3.checkpoint import read_settings
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
    return load_folder(resolve(name), dtype=dtype)


def load_folder(folder: Path, *, dtype: mx.Dtype | None = None) -> tuple[Transformer, Tokenizer]:
    """As `load`, for a folder that is there. What is quick to find wrong fails before gigabytes are read."""
    read_settings(folder)  # knows best what a folder is that is no model's
    tokenizer = load_tokenizer(folder)
    return load_model(folder, dtype=dtype), tokenizer
