"""Meta's `params.json`, read into `ModelArgs`."""

from collections.abc import Mapping
from typing import Any

from mlx_llama3.checkpoint.config_keys import ConfigKeys, build
from mlx_llama3.model.config import ConfigError, ModelArgs, RopeScaling, llama3_rope_factor


def ffn_width(dim: int, multiple_of: int, ffn_dim_multiplier: float | None) -> int:
    """The hidden width of the SwiGLU layer in Meta's formula: two thirds of 4*dim, scaled, rounded up to `multiple_of`.

    14336 / 28672 / 53248 for 8B / 70B / 405B (Meta `models/llama3/model.py`, `FeedForward.__init__`).
    """
    hidden = int(2 * 4 * dim / 3)
    if ffn_dim_multiplier is not None:
        hidden = int(ffn_dim_multiplier * hidden)
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


_KNOWN = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps",
    "rope_theta", "use_scaled_rope", "max_batch_size", "max_seq_len", "quantization_args", "lora_args",
}  # fmt: skip


def from_meta(
    params: Mapping[str, Any], *, source: str, rope_factor: float | None = None, vocab_size: int | None = None
) -> ModelArgs:
    """Turn Meta's `params.json`, already parsed, into `ModelArgs`.

    The file states only `use_scaled_rope: true`; the factor is `rope_factor`, or by default `llama3_rope_factor`.
    `vocab_size` is the number of rows of the embedding, for files that state -1 (to be taken from the tokenizer).
    `source` names the file in messages.

    Raises:
        ConfigError: a key is unknown, missing or wrong, or belongs to a model that this program does not run.
    """
    for key in params:
        if key.startswith("vision_"):
            raise ConfigError(f"{source}: {key}: a vision checkpoint; only the text models of Llama 3 run here")
        if key not in _KNOWN:
            raise ConfigError(f"{source}: unknown key {key!r}; this is not a Llama 3 params.json")
    for key in ("quantization_args", "lora_args"):
        if params.get(key):
            raise ConfigError(
                f"{source}: {key}: one of Meta's QAT/SpinQuant/LoRA checkpoints; convert the plain bfloat16 one instead"
            )
    if params.get("vocab_size") == -1:
        if vocab_size is None:
            raise ConfigError(f"{source}: vocab_size is -1 and there is no embedding to take it from")
        params = {**params, "vocab_size": vocab_size}
    keys = ConfigKeys(params, source)
    dim, n_layers, n_heads = keys.whole("dim"), keys.whole("n_layers"), keys.whole("n_heads")
    if dim % n_heads:
        raise ConfigError(f"{source}: dim {dim} is not a multiple of n_heads {n_heads}")
    multiplier = keys.positive("ffn_dim_multiplier", 1.0)
    scaling = None
    if keys.flag("use_scaled_rope"):
        scaling = RopeScaling(llama3_rope_factor(dim, n_layers) if rope_factor is None else rope_factor)
    return build(
        ModelArgs,
        source,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=keys.whole("n_kv_heads", n_heads),
        head_dim=dim // n_heads,
        hidden_dim=ffn_width(dim, keys.whole("multiple_of", 256), multiplier),
        vocab_size=keys.whole("vocab_size"),
        norm_eps=keys.positive("norm_eps"),
        rope_theta=keys.positive("rope_theta"),
        max_seq_len=131072 if scaling else 8192,
        rope_scaling=scaling,
    )
