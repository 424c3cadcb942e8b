"""A tiny Llama as a GGUF file, and the same weights by Hugging Face name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_builder import TOKENIZER, TOKENS, Entry, encoded, gguf_bytes, to_interleaved

from convert.gguf.types import LAYOUTS, TYPE_NUMBERS
from mlx_llama3.checkpoint.tensor_names import hf_to_gguf
from mlx_llama3.checkpoint.tensor_shapes import expected_shapes
from mlx_llama3.model.config import ModelArgs

ARGS = ModelArgs(
    dim=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=512, vocab_size=len(TOKENS), norm_eps=1e-5,
    rope_theta=500000.0, max_seq_len=8192, tie_word_embeddings=True,
)  # fmt: skip

# The matrix that `write_k_quants` quantizes.
LAST_Q = "model.layers.1.self_attn.q_proj.weight"


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
    """Hugging Face name -> float32, with magnitudes of real weights."""
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
    """Write a model; returns its weights by Hugging Face name."""
    weights = random_weights(args)
    path.write_bytes(gguf_bytes(metadata(args), entries(weights, args, type_name)))
    return weights


def _random_blocks(shape: tuple[int, int], type_name: str) -> np.ndarray:
    """Random encoded rows, uint8 (rows, row bytes), of a type that the gguf package cannot write."""
    layout, rng = LAYOUTS[type_name], np.random.default_rng(1)
    raw = rng.integers(0, 256, (shape[0], shape[1] // layout.values * layout.n_bytes), dtype=np.uint8)
    blocks = raw.reshape(-1).view(layout.fields)
    for field in {"d", "dmin"} & set(layout.fields.names):
        blocks[field] = rng.uniform(0.5, 1.5, blocks.size) * 1e-4
    return raw


def write_k_quants(path: Path, type_name: str) -> np.ndarray:
    """Write a model with only `LAST_Q` of `type_name`; returns that matrix, dequantized by the gguf package."""
    weights = random_weights()
    raw = _random_blocks(weights[LAST_Q].shape, type_name)
    stored = Entry("blk.1.attn_q.weight", weights[LAST_Q].shape, TYPE_NUMBERS[type_name], raw.tobytes())
    path.write_bytes(gguf_bytes(metadata(), [e if e.name != stored.name else stored for e in entries(weights)]))
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    # From GGUF's row order to Hugging Face's: the inverse of `to_interleaved`.
    order = np.argsort(to_interleaved(np.arange(len(values))[:, None], ARGS.n_heads)[:, 0])
    return values[order]
