"""Writes checkpoint folders in Meta's format: random weights with Meta's names and layout, in model-parallel shards."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
from torch_zip import bf16_bits, write_pth

PARAMS = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 4,
    "vocab_size": 256,
    "ffn_dim_multiplier": 1.0,
    "multiple_of": 32,
    "norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "use_scaled_rope": False,
}


def meta_weights(params: dict[str, Any] = PARAMS, seed: int = 0) -> dict[str, np.ndarray]:
    """Meta's name -> tensor, float32, with values that bfloat16 and float16 represent exactly."""
    dim, head = params["dim"], params["dim"] // params["n_heads"]
    hidden = -(-int(params["ffn_dim_multiplier"] * int(8 * dim / 3)) // params["multiple_of"]) * params["multiple_of"]
    kv = head * params["n_kv_heads"]
    shapes = {"tok_embeddings.weight": (params["vocab_size"], dim)}
    for layer in range(params["n_layers"]):
        shapes |= {
            f"layers.{layer}.attention.wq.weight": (dim, dim),
            f"layers.{layer}.attention.wk.weight": (kv, dim),
            f"layers.{layer}.attention.wv.weight": (kv, dim),
            f"layers.{layer}.attention.wo.weight": (dim, dim),
            f"layers.{layer}.feed_forward.w1.weight": (hidden, dim),
            f"layers.{layer}.feed_forward.w2.weight": (dim, hidden),
            f"layers.{layer}.feed_forward.w3.weight": (hidden, dim),
            f"layers.{layer}.attention_norm.weight": (dim,),
            f"layers.{layer}.ffn_norm.weight": (dim,),
        }
    shapes |= {"norm.weight": (dim,), "output.weight": (params["vocab_size"], dim)}
    rng = np.random.default_rng(seed)
    return {
        name: (rng.integers(-31, 32, shape) / 64 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def split_tensor(name: str, whole: np.ndarray, count: int, head_dim: int) -> list[np.ndarray]:
    """The shards of a tensor for `count` ranks. With more ranks than KV heads, neighbours have copies of one head."""
    kind = name.split(".")[-2]
    if whole.ndim == 1:
        return [whole] * count
    if kind in ("wo", "w2"):
        return np.split(whole, count, axis=1)
    if kind in ("wk", "wv") and count > whole.shape[0] // head_dim:
        whole = np.repeat(whole.reshape(-1, head_dim, whole.shape[1]), count * head_dim // whole.shape[0], axis=0)
        whole = whole.reshape(-1, whole.shape[-1])
    return np.split(whole, count, axis=0)


def stored(values: np.ndarray, kind: str) -> tuple[str, np.ndarray]:
    """(dtype, bits) for `write_pth`."""
    if kind == "BF16":
        return kind, bf16_bits(values)
    return kind, values.astype({"F32": np.float32, "F16": np.float16}[kind])


def write_meta(
    folder: Path,
    count: int = 1,
    weights: dict[str, np.ndarray] | None = None,
    *,
    kind: str = "BF16",
    params: dict[str, Any] = PARAMS,
    **written: Any,
) -> Path:
    """Write a folder with `params.json` (`written` overrides) and `count` files `consolidated.NN.pth`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params | written))
    weights = meta_weights(params) if weights is None else weights
    shards = {
        name: split_tensor(name, whole, count, params["dim"] // params["n_heads"]) for name, whole in weights.items()
    }
    for rank in range(count):
        tensors = {name: stored(parts[rank], kind) for name, parts in shards.items()}
        tensors["rope.freqs"] = stored(np.ones(4, np.float32), kind)
        write_pth(folder / f"consolidated.{rank:02d}.pth", tensors)
    return folder


def hf_rows(name: str, whole: np.ndarray, head_dim: int) -> np.ndarray:
    """A tensor of Meta in Hugging Face's layout: the rows of wq and wk in two halves per head."""
    if name.split(".")[-2] not in ("wq", "wk"):
        return whole
    heads, columns = whole.shape[0] // head_dim, whole.shape[1]
    return whole.reshape(heads, head_dim // 2, 2, columns).transpose(0, 2, 1, 3).reshape(whole.shape)


def write_tokenizer_model(path: Path, ranks: int) -> None:
    """Write a `tokenizer.model` in Meta's format: all bytes, then pairs of bytes."""
    tokens = [bytes([n]) for n in range(256)] + [bytes([n // 256 + 96, n % 256]) for n in range(256, ranks)]
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
