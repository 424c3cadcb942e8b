"""A tiny Llama as a GGUF, and the same weights under their Hugging Face names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf_builder import TOKENIZER, TOKENS, Entry, encoded, gguf_bytes, to_interleaved

from mlx_llama3.config import ModelArgs
from mlx_llama3.names import hf_to_gguf
from mlx_llama3.shapes import expected_shapes

ARGS = ModelArgs(
    dim=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=512, vocab_size=len(TOKENS), norm_eps=1e-5,
    rope_theta=500000.0, max_seq_len=8192, tie_word_embeddings=True,
)  # fmt: skip


def metadata(args: ModelArgs = ARGS) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.block_count": args.n_layers,
        "llama.context_length": args.max_seq_len,
        "llama.embedding_length": args.dim,
        "llama.feed_forward_length": args.hidden_dim,
        "llama.attention.head_count": args.n_heads,
        "llama.attention.head_count_kv": args.n_kv_heads,
        "llama.attention.key_length": args.head_dim,
        "llama.attention.layer_norm_rms_epsilon": args.norm_eps,
        "llama.rope.freq_base": args.rope_theta,
        **TOKENIZER,
    }


def random_weights(args: ModelArgs = ARGS, seed: int = 0) -> dict[str, np.ndarray]:
    """Hugging Face name -> float32, of the size of real weights."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape, np.float32) * 0.05 + (len(shape) == 1)).astype(np.float32)
        for name, shape in expected_shapes(args).items()
    }


def entries(weights: Mapping[str, np.ndarray], args: ModelArgs = ARGS, type_name: str = "F32") -> list[Entry]:
    """The tensors of a GGUF: matrices as `type_name`, vectors as F32."""
    tensors = []
    for name, values in weights.items():
        if "q_proj" in name or "k_proj" in name:
            values = to_interleaved(values, args.n_heads if "q_proj" in name else args.n_kv_heads)
        tensors.append(encoded(hf_to_gguf(name), values, type_name if values.ndim == 2 else "F32"))
    return tensors


def write_tiny(path: Path, type_name: str = "F32", args: ModelArgs = ARGS) -> dict[str, np.ndarray]:
    """Write a whole model; returns its weights by Hugging Face name."""
    weights = random_weights(args)
    path.write_bytes(gguf_bytes(metadata(args), entries(weights, args, type_name)))
    return weights
