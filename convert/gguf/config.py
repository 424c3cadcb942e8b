"""Reads `ModelArgs` from GGUF metadata (`llama.*` keys; ggml `docs/gguf.md`, "LLM")."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from convert.gguf.reader import GGUFError, GGUFTensor
from convert.gguf.rope_factors import ORIGINAL_MAX_POSITION, scaling_from_factors
from mlx_llama3.model.config import ConfigError, ModelArgs, RopeScaling, llama3_rope_factor

ROPE_FACTORS = "rope_freqs.weight"
# RoPE base and context length of Llama 3.1 and later. 3.0 has the same base with a context of 8192; long-context
# fine-tunes of 3.0 have another base.
SCALED_THETA, SCALED_CONTEXT = 500_000.0, 131_072
# Keys that change the computation, unless they are absent, zero or have this value.
FOREIGN_KEYS = {
    "attention.scale": 0,
    "attention.sliding_window": 0,
    "embedding_scale": 1,
    "expert_count": 0,
    "logit_scale": 1,
    "residual_scale": 1,
}


def args_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], source: str
) -> tuple[ModelArgs, list[str]]:
    """Read `ModelArgs`; the second result is sentences about what had to be assumed.

    Args:
        metadata: the metadata of the file (of the first part, if it is split).
        tensors: the tensor directory; only the data of `rope_freqs.weight` is read.
        source: the file, for messages.

    Raises:
        GGUFError: the architecture is not Llama; a key is missing, of the wrong type or not supported; numbers
            contradict each other.
    """
    keys = _Keys(metadata, source)
    architecture = keys.text("general.architecture")
    if architecture != "llama":
        raise GGUFError(
            f"{source}: general.architecture is {architecture!r:.60}; only models of architecture 'llama' run here"
        )
    for key, neutral in FOREIGN_KEYS.items():
        value = metadata.get(f"llama.{key}")
        if value not in (None, 0, neutral):
            raise GGUFError(f"{source}: llama.{key} is {value!r:.60}: this model is not of the Llama 3 architecture")
    dim, n_heads = keys.count("llama.embedding_length"), keys.count("llama.attention.head_count")
    fields = {
        "dim": dim,
        "n_layers": _layers(keys, tensors),
        "n_heads": n_heads,
        "n_kv_heads": keys.count("llama.attention.head_count_kv", n_heads),
        "head_dim": _head_dim(keys, dim, n_heads),
        "hidden_dim": keys.count("llama.feed_forward_length"),
        "vocab_size": _vocab_size(keys, tensors),
        "norm_eps": keys.positive("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.positive("llama.rope.freq_base"),
        "max_seq_len": keys.count("llama.context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    try:
        args = ModelArgs(**fields)
    except ConfigError as error:
        raise GGUFError(f"{source}: {error}") from error
    scaling, notes = _rope_scaling(keys, tensors, args)
    return replace(args, rope_scaling=scaling), notes


class _Keys:
    """Typed access to metadata; a missing or wrong value raises an error that names the key."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata, self.source = metadata, source

    def fail(self, key: str, expected: str) -> GGUFError:
        if key not in self.metadata:
            return GGUFError(f"{self.source}: metadata key {key!r} is missing; expected {expected}")
        return GGUFError(f"{self.source}: metadata key {key!r} is {self.metadata[key]!r:.60}, expected {expected}")

    def text(self, key: str) -> str:
        if not isinstance(self.metadata.get(key), str):
            raise self.fail(key, "a string")
        return self.metadata[key]

    def count(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(key, default)
        # Some architectures write an array with one number per layer. It is accepted if all numbers are equal.
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if type(value) is not int or value < 1:
            raise self.fail(key, "a whole number from 1 on")
        return value

    def positive(self, key: str) -> float:
        value = self.metadata.get(key)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.fail(key, "a positive number")
        # GGUF stores float32, so 1e-05 is read as 9.999999747378752e-06. The shortest decimal with the same float32
        # value is the number that was written.
        shortest = np.float32(value)
        return float(str(shortest)) if shortest == value else float(value)


def _layers(keys: _Keys, tensors: Mapping[str, GGUFTensor]) -> int:
    n_layers = keys.count("llama.block_count")
    # A damaged count must fail here, before the tensors of so many layers are listed.
    if n_layers > len(tensors):
        raise GGUFError(f"{keys.source}: llama.block_count is {n_layers}, but there are only {len(tensors)} tensors")
    return n_layers


def _head_dim(keys: _Keys, dim: int, n_heads: int) -> int:
    given = ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count")
    sizes = {key: keys.count(key) for key in given if key in keys.metadata}
    if not sizes and dim % n_heads:
        raise keys.fail("llama.attention.key_length", f"it, as {dim} is not a multiple of {n_heads} heads")
    head_dim = next(iter(sizes.values()), dim // n_heads)
    if any(size != head_dim for size in sizes.values()):
        raise GGUFError(f"{keys.source}: {', '.join(f'{key} {size}' for key, size in sizes.items())}: must be equal")
    return head_dim


def _vocab_size(keys: _Keys, tensors: Mapping[str, GGUFTensor]) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise GGUFError(f"{keys.source}: tensor 'token_embd.weight' is missing; this is no complete model")
    rows = embedding.shape[0]
    stated = keys.count("llama.vocab_size", rows)
    if stated != rows:
        raise GGUFError(f"{keys.source}: llama.vocab_size is {stated}, but token_embd.weight has {rows} rows")
    return rows


def _rope_scaling(
    keys: _Keys, tensors: Mapping[str, GGUFTensor], args: ModelArgs
) -> tuple[RopeScaling | None, list[str]]:
    kind = keys.metadata.get("llama.rope.scaling.type", "linear")
    factor = keys.metadata.get("llama.rope.scaling.factor", keys.metadata.get("llama.rope.scale_linear", 1))
    if kind not in ("none", "llama3") and not (kind == "linear" and factor in (0, 1)):
        raise keys.fail("llama.rope.scaling.type", "'none'; other RoPE scalings than Llama 3.1's are not supported")
    original = keys.count("llama.rope.scaling.original_context_length", ORIGINAL_MAX_POSITION)
    if ROPE_FACTORS in tensors:
        return scaling_from_factors(_read_factors(tensors[ROPE_FACTORS]), args, original, keys.source), []
    if kind == "llama3":
        return RopeScaling(keys.positive("llama.rope.scaling.factor"), original_max_position=original), []
    if (args.rope_theta, args.max_seq_len) != (SCALED_THETA, SCALED_CONTEXT):
        return None, []
    factor = llama3_rope_factor(args.dim, args.n_layers)  # early files of Llama 3.1 lack the tensor
    note = (
        f"{ROPE_FACTORS} is missing; Llama 3.1's RoPE scaling with factor {factor:g} was taken for this context length"
    )
    return RopeScaling(factor), [note]


def _read_factors(tensor: GGUFTensor) -> np.ndarray:
    if tensor.type != "F32" or len(tensor.shape) != 1:
        raise GGUFError(
            f"{tensor.path}: tensor {tensor.name!r} is {tensor.type} {tensor.shape}, expected an F32 vector"
        )
    return tensor.read_rows(0, 1).view("<f4")[0]
