"""Folders of tiny models whose heads, groups and vocabularies do and do not divide by the number of ranks."""

from pathlib import Path
from typing import Any

import pytest
from tiny_models import quantized, random_weights, tiny_args, write_folder

from mlx_llama3.model.config import ModelArgs

# 321 rows do not divide by 2 or 4, nor do the 5 groups of 160 columns.
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"vocab_size": 321},
    "tied 4 bit": {"tie_word_embeddings": True, "hidden_dim": 160},
    "8 bit": {"n_heads": 8, "n_kv_heads": 4, "head_dim": 32, "hidden_dim": 256, "vocab_size": 321},
    "3 heads": {"n_heads": 9, "n_kv_heads": 3, "tie_word_embeddings": True},
    "four layers": {"n_layers": 4},
}
BITS = {"tied 4 bit": 4, "8 bit": 8}


def args_of(name: str) -> ModelArgs:
    return tiny_args(**{"n_layers": 2} | SHAPES[name])


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model folder for each of `SHAPES`."""
    root, folders = tmp_path_factory.mktemp("parts"), {}
    for seed, name in enumerate(SHAPES):
        args, settings = args_of(name), {}
        weights = random_weights(args, seed=seed)
        if name in BITS:
            weights = quantized(weights, bits=BITS[name])
            settings = {"quantization": {"bits": BITS[name], "group_size": 32}}
        folders[name] = write_folder(root / name.replace(" ", "-"), args, weights, **settings)
    return folders
