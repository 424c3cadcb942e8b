"""Hugging Face's `config.json`, read into `ModelArgs` and written from it.

transformers <= 4 writes `rope_theta` and `rope_scaling`, transformers >= 5 writes `rope_parameters`; both are read.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mlx_llama3.checkpoint.config_keys import ConfigKeys, build
from mlx_llama3.model.config import ConfigError, ModelArgs, RopeScaling

log = logging.getLogger(__name__)

# Keys that must be absent, null or one of these values, because any other value changes the computation.
_HF_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "rope_traditional": (False,),
    "partial_rotary_factor": (1, 1.0),
    "sliding_window": (),
}
# Keys that are read below, or that do not affect inference.
_HF_KNOWN = {
    "architectures", "attention_dropout", "attn_implementation", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "dtype", "eos_token_id", "head_dim", "hidden_size", "id2label", "initializer_range", "intermediate_size",
    "is_llama_config", "label2id", "layer_types", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "output_attentions", "output_hidden_states", "pad_token_id",
    "pretraining_tp", "quantization", "quantization_config", "return_dict", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache", "vocab_size", "_name_or_path",
    "_attn_implementation", "_attn_implementation_autoset",
}  # fmt: skip
# An unknown key whose name contains one of these probably changes the computation.
_HF_SUSPECT = (
    "attention",
    "attn",
    "bias",
    "expert",
    "multiplier",
    "norm",
    "rope",
    "rotary",
    "scal",
    "softcap",
    "window",
)
# A key with one of these says how attention is computed or trained, not what it computes.
_HF_HARMLESS = ("flash", "sdpa", "xformers", "memory_efficient", "dropout", "pdrop", "fused", "_impl")


def from_hf(config: Mapping[str, Any], *, source: str) -> ModelArgs:
    """Read a parsed Hugging Face `config.json`, as transformers <= 4 or >= 5 writes it.

    Unknown keys are logged as a warning, unless their names refer to attention, norms, RoPE and the like.

    Raises:
        ConfigError: another architecture; a missing key; an unknown key that may change the computation; or two keys
            that contradict each other.
    """
    keys = ConfigKeys(config, source)
    keys.required("model_type")
    _check_hf_keys(config, source)
    dim, n_heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    if config.get("head_dim") is None and dim % n_heads:
        raise ConfigError(f"{source}: hidden_size {dim} is not a multiple of num_attention_heads {n_heads}")
    theta, scaling = _hf_rope(config, source)
    return build(
        ModelArgs,
        source,
        dim=dim,
        n_layers=keys.whole("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=keys.whole("num_key_value_heads", n_heads),
        head_dim=keys.whole("head_dim", dim // n_heads),
        hidden_dim=keys.whole("intermediate_size"),
        vocab_size=keys.whole("vocab_size"),
        norm_eps=keys.positive("rms_norm_eps"),
        rope_theta=theta,
        max_seq_len=keys.whole("max_position_embeddings"),
        rope_scaling=scaling,
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
    )


def _check_hf_keys(config: Mapping[str, Any], source: str) -> None:
    for key, allowed in _HF_FIXED.items():
        value = config.get(key)
        if value is not None and value not in allowed:
            expected = f"must be {allowed[0]!r}" if allowed else "must be absent or null"
            raise ConfigError(
                f"{source}: {key} is {value!r}, {expected}: this model is not of the Llama 3 architecture"
            )
    layer_types = config.get("layer_types")
    if layer_types is not None and not (
        isinstance(layer_types, list) and layer_types.count("full_attention") == len(layer_types)
    ):
        raise ConfigError(f"{source}: layer_types is {layer_types!r:.60}, must be a list of 'full_attention' only")
    unknown = [k for k, v in config.items() if k not in _HF_KNOWN and k not in _HF_FIXED and v not in (None, False)]
    for key in unknown:
        suspect, harmless = (any(word in key.lower() for word in words) for words in (_HF_SUSPECT, _HF_HARMLESS))
        if suspect and not harmless:
            raise ConfigError(f"{source}: unknown key {key!r} = {config[key]!r}; it may change what the model computes")
    if unknown:
        log.warning("%s: keys ignored: %s", source, ", ".join(sorted(unknown)))


def _hf_rope(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """RoPE's base and scaling, from `rope_parameters` (new), `rope_theta` and `rope_scaling` (old), or from both."""
    groups = [(key, config[key]) for key in ("rope_scaling", "rope_parameters") if config.get(key) is not None]
    for key, group in groups:
        if not isinstance(group, Mapping):
            raise ConfigError(f"{source}: {key} is {group!r:.60}, must be an object or null")
    sections = [ConfigKeys(config, source), *(ConfigKeys(group, f"{source}: {key}") for key, group in groups)]
    thetas = {keys.positive("rope_theta") for keys in sections if keys.mapping.get("rope_theta") is not None}
    if not thetas:
        raise ConfigError(f"{source}: missing rope_theta (neither at the top level nor in rope_parameters)")
    if len(thetas) > 1:
        raise ConfigError(f"{source}: rope_theta is given as {' and as '.join(map(str, sorted(thetas)))}")
    scalings = [_hf_scaling(keys) for keys in sections[1:] if keys.mapping]
    if any(r != scalings[0] for r in scalings):
        raise ConfigError(f"{source}: rope_scaling and rope_parameters contradict each other")
    return thetas.pop(), scalings[0] if scalings else None


def _hf_scaling(keys: ConfigKeys) -> RopeScaling | None:
    kind = keys.mapping.get("rope_type", keys.mapping.get("type", "default"))
    if (part := keys.mapping.get("partial_rotary_factor")) not in (None, 1):
        raise ConfigError(f"{keys.source}: partial_rotary_factor is {part!r}, must be 1: Llama 3 rotates whole heads")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"{keys.source}: rope_type is {kind!r}; this program supports 'default' and 'llama3'")
    return build(
        RopeScaling,
        keys.source,
        factor=keys.positive("factor"),
        low_freq_factor=keys.positive("low_freq_factor"),
        high_freq_factor=keys.positive("high_freq_factor"),
        original_max_position=keys.whole("original_max_position_embeddings"),
    )


def to_hf(args: ModelArgs) -> dict[str, Any]:
    """`config.json` of a converted folder, with RoPE in both dialects, so that every reader understands it."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if args.rope_scaling:
        scaling = asdict(args.rope_scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_position")
        rope = {"rope_type": "llama3", **scaling}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "intermediate_size": args.hidden_dim,
        "vocab_size": args.vocab_size,
        "rms_norm_eps": args.norm_eps,
        "max_position_embeddings": args.max_seq_len,
        "tie_word_embeddings": args.tie_word_embeddings,
        "rope_theta": args.rope_theta,
        "rope_scaling": rope if args.rope_scaling else None,
        "rope_parameters": {"rope_theta": args.rope_theta, **rope},
    }
