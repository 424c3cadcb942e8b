"""Tiny random models: in memory, and as folders on disk with Hugging Face names."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx_llama3  # first: it puts a fast BLAS in place before MLX is loaded  # noqa: F401
from mlx_llama3.checkpoint.config_json import to_hf
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.checkpoint.tensor_shapes import expected_shapes
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx

ARGS = ModelArgs(
    dim=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    hidden_dim=96,
    vocab_size=320,
    norm_eps=1e-5,
    rope_theta=10000.0,
    max_seq_len=512,
)


def tiny_args(**changes: Any) -> ModelArgs:
    """The arguments of a model of about 150,000 weights, which runs in milliseconds; changes: fields of `ModelArgs`."""
    return replace(ARGS, **changes)


def random_weights(args: ModelArgs, *, seed: int = 0, scale: float = 0.1) -> dict[str, mx.array]:
    """Hugging Face name -> tensor, float32; norms around 1. The same seed gives the same weights."""
    weights = {}
    for key, (name, shape) in zip(
        mx.random.split(mx.random.key(seed), 512), expected_shapes(args).items(), strict=False
    ):
        noise = mx.random.normal(shape, key=key) * scale
        weights[name] = noise + 1 if len(shape) == 1 else noise
    return weights


def write_folder(folder: Path, args: ModelArgs, weights: dict[str, mx.array] | None = None, **settings: Any) -> Path:
    """Write a model folder without tokenizer: `config.json` (`settings` overrides) and `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf(args) | settings))
    weights = random_weights(args) if weights is None else weights
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def quantized(
    weights: dict[str, mx.array], *, bits: int = 4, group_size: int = 32, mode: str = "affine"
) -> dict[str, mx.array]:
    """The same tensors with every matrix quantized by `mx.quantize`."""
    packed = {}
    for name, weight in weights.items():
        if weight.ndim == 1:
            packed[name] = weight
            continue
        parts = mx.quantize(weight, group_size=group_size, bits=bits, mode=mode)
        packed |= {
            name.replace(".weight", f".{part}"): p
            for part, p in zip(("weight", "scales", "biases"), parts, strict=False)
        }
    return packed


def tiny_model(folder: Path, args: ModelArgs = ARGS, *, seed: int = 0) -> Transformer:
    """A tiny random model, written to `folder` and loaded from there."""
    return load_model(write_folder(folder, args, random_weights(args, seed=seed)))
