"""The shape of a model: `ModelArgs`, and readers for the three dialects in which the world writes it down.

Meta's `params.json`, Hugging Face's `config.json` as transformers <= 4 writes it (`rope_theta`, `rope_scaling`) and as
transformers >= 5 writes it (`rope_parameters`). A value that is unknown, missing or contradicts another raises
`ConfigError` with the key's name: a silent default is the worst fault of this field.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_llama3.errors import UserError

log = logging.getLogger(__name__)


class ConfigError(UserError):
    """A configuration that cannot be read for what it is: names the file and the key."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the RoPE wavelengths (Meta `models/llama3/model.py`, `apply_scaling`).

    Wavelengths (in positions) longer than `original_max_position / low_freq_factor` are stretched by `factor`, those
    shorter than `original_max_position / high_freq_factor` are kept, those between are blended.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelArgs:
    """Everything that decides the mathematics, with Meta's field names (`models/llama3/args.py`) where Meta has one.

    `hidden_dim` is the width of the feed-forward layer (14336 for 8B), `head_dim` that of one head, `max_seq_len` the
    number of positions the model was trained for.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    max_seq_len: int
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for key in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size", "max_seq_len"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{key} is {value!r}; it must be a whole number of at least 1")
        for key in ("norm_eps", "rope_theta"):
            value = getattr(self, key)
            if not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{key} is {value!r}; it must be a number above 0")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs")


def ffn_width(dim: int, multiple_of: int, ffn_dim_multiplier: float | None) -> int:
    """Meta's width of the SwiGLU layer: two thirds of 4*dim, scaled, rounded up to `multiple_of`.

    14336 / 28672 / 53248 for 8B / 70B / 405B (Meta `models/llama3/model.py`, `FeedForward.__init__`).
    """
    hidden = int(2 * 4 * dim / 3)
    if ffn_dim_multiplier is not None:
        hidden = int(ffn_dim_multiplier * hidden)
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


# --- Meta's params.json -------------------------------------------------------------------------------------------

_META_KEYS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps",
    "rope_theta", "use_scaled_rope", "max_batch_size", "max_seq_len", "quantization_args", "lora_args",
}  # fmt: skip


def from_meta(
    params: Mapping[str, Any], *, source: str, rope_factor: float | None = None, vocab_size: int | None = None
) -> ModelArgs:
    """Read Meta's `params.json` (already parsed).

    The file says only `use_scaled_rope: true`; Meta's code hard-codes the factor 8, which is right for 3.1 and 3.3. The
    3.2 text models (1B: dim 2048, 16 layers; 3B: dim 3072, 28 layers) were trained with 32. `rope_factor` overrides.
    `vocab_size` gives the rows of the embedding for files that say -1 ("ask the tokenizer").

    Raises:
        ConfigError: a key is unknown or missing, or names something that this program does not run.
    """
    for key in params:
        if key.startswith("vision_"):
            raise ConfigError(f"{source}: {key}: a vision checkpoint; only the text models of Llama 3 run here")
        if key not in _META_KEYS:
            raise ConfigError(f"{source}: unknown key {key!r}; this is not a Llama 3 params.json")
    for key in ("quantization_args", "lora_args"):
        if params.get(key):
            raise ConfigError(
                f"{source}: {key}: one of Meta's QAT/SpinQuant/LoRA checkpoints; convert the plain bfloat16 one instead"
            )
    need = _required(params, source)
    dim, n_layers, n_heads = need("dim"), need("n_layers"), need("n_heads")
    if dim % n_heads:
        raise ConfigError(f"{source}: dim {dim} is not a multiple of n_heads {n_heads}")
    vocab = need("vocab_size")
    if vocab == -1:
        if vocab_size is None:
            raise ConfigError(f"{source}: vocab_size is -1 and there is no embedding to take it from")
        vocab = vocab_size
    scaling = None
    if params.get("use_scaled_rope"):
        scaling = RopeScaling(rope_factor or (32.0 if (dim, n_layers) in ((2048, 16), (3072, 28)) else 8.0))
    return ModelArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=params.get("n_kv_heads") or n_heads,
        head_dim=dim // n_heads,
        hidden_dim=ffn_width(dim, params.get("multiple_of", 256), params.get("ffn_dim_multiplier")),
        vocab_size=vocab,
        norm_eps=need("norm_eps"),
        rope_theta=float(need("rope_theta")),
        max_seq_len=131072 if scaling else 8192,
        rope_scaling=scaling,
    )


# --- Hugging Face's config.json -----------------------------------------------------------------------------------

# What must have this value (or be absent or null), because another one changes the mathematics.
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
# What was read above, or changes nothing about what is computed at inference.
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
# An unknown key with one of these in its name probably does change it.
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


def from_hf(config: Mapping[str, Any], *, source: str) -> ModelArgs:
    """Read a Hugging Face `config.json` (already parsed), as transformers <= 4 or >= 5 writes it.

    Keys that are unknown and harmless are logged as a warning; unknown keys whose names speak of attention, norms,
    RoPE and the like raise.

    Raises:
        ConfigError: another architecture, a missing or unknown key, or two keys that contradict each other.
    """
    need = _required(config, source)
    need("model_type")
    _check_hf_keys(config, source)
    dim, n_heads = need("hidden_size"), need("num_attention_heads")
    if config.get("head_dim") is None and dim % n_heads:
        raise ConfigError(f"{source}: hidden_size {dim} is not a multiple of num_attention_heads {n_heads}")
    theta, scaling = _hf_rope(config, source)
    return ModelArgs(
        dim=dim,
        n_layers=need("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=config.get("num_key_value_heads") or n_heads,
        head_dim=config.get("head_dim") or dim // n_heads,
        hidden_dim=need("intermediate_size"),
        vocab_size=need("vocab_size"),
        norm_eps=need("rms_norm_eps"),
        rope_theta=theta,
        max_seq_len=need("max_position_embeddings"),
        rope_scaling=scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _check_hf_keys(config: Mapping[str, Any], source: str) -> None:
    for key, allowed in _HF_FIXED.items():
        value = config.get(key)
        if value is not None and value not in allowed:
            expected = f"must be {allowed[0]!r}" if allowed else "must be absent or null"
            raise ConfigError(
                f"{source}: {key} is {value!r}, {expected}: this model is not of the Llama 3 architecture"
            )
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError(f"{source}: layer_types holds {config['layer_types'][0]!r}, must all be 'full_attention'")
    unknown = [k for k, v in config.items() if k not in _HF_KNOWN and k not in _HF_FIXED and v not in (None, False)]
    for key in unknown:
        if any(word in key.lower() for word in _HF_SUSPECT):
            raise ConfigError(f"{source}: unknown key {key!r} = {config[key]!r}; it may change what the model computes")
    if unknown:
        log.warning("%s: keys ignored: %s", source, ", ".join(sorted(unknown)))


def _hf_rope(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """RoPE from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old), or from both if they agree."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    for key, group in (("rope_scaling", old), ("rope_parameters", new)):
        if group is not None and not isinstance(group, Mapping):
            raise ConfigError(f"{source}: {key} is {group!r}, must be an object or null")
    thetas = {
        float(t) for t in (config.get("rope_theta"), (new or {}).get("rope_theta"), (old or {}).get("rope_theta")) if t
    }
    if not thetas:
        raise ConfigError(f"{source}: missing rope_theta (looked for it beside and inside rope_parameters)")
    if len(thetas) > 1:
        raise ConfigError(f"{source}: rope_theta is given as {' and as '.join(map(str, sorted(thetas)))}")
    readings = [
        _hf_scaling(group, key, source) for key, group in (("rope_scaling", old), ("rope_parameters", new)) if group
    ]
    if any(r != readings[0] for r in readings):
        raise ConfigError(f"{source}: rope_scaling and rope_parameters contradict each other")
    return thetas.pop(), readings[0] if readings else None


def _hf_scaling(group: Mapping[str, Any], key: str, source: str) -> RopeScaling | None:
    kind = group.get("rope_type", group.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"{source}: {key}.rope_type is {kind!r}; this program knows 'default' and 'llama3'")
    need = _required(group, f"{source}: {key}")
    return RopeScaling(
        factor=float(need("factor")),
        low_freq_factor=float(need("low_freq_factor")),
        high_freq_factor=float(need("high_freq_factor")),
        original_max_position=int(need("original_max_position_embeddings")),
    )


def to_hf(args: ModelArgs) -> dict[str, Any]:
    """`config.json` for a converted folder, with RoPE in both dialects so that every reader finds it."""
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


# --- common to all ------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a file; a missing, unreadable or other file raises `ConfigError` naming it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _required(mapping: Mapping[str, Any], source: str) -> Callable[[str], Any]:
    def need(key: str) -> Any:
        if mapping.get(key) is None:
            raise ConfigError(f"{source}: missing key {key!r}")
        return mapping[key]

    return need
