"""The shape of a model: `ModelArgs`, and readers for the three dialects in which the world writes it down.

Meta's `params.json`, Hugging Face's `config.json` as transformers <= 4 writes it (`rope_theta`, `rope_scaling`) and as
transformers >= 5 writes it (`rope_parameters`). A value that is unknown, missing or contradicts another raises
`ConfigError` with the key's name: a silent default is the worst fault of this field.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from mlx_llama3.errors import UserError
from mlx_llama3.system.files import parse_json, read_bytes

log = logging.getLogger(__name__)

_LARGEST_INT = 2**31 - 1  # of MLX's shapes
_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127  # of float32
_Made = TypeVar("_Made")


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

    def __post_init__(self) -> None:
        for key in ("factor", "low_freq_factor", "high_freq_factor"):
            _check_positive(key, getattr(self, key))
        _check_whole("original_max_position", self.original_max_position)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor {self.low_freq_factor}"
            )


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
            _check_whole(key, getattr(self, key))
        for key in ("norm_eps", "rope_theta"):
            _check_positive(key, getattr(self, key))
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs")


def _check_whole(key: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= _LARGEST_INT:
        raise ConfigError(f"{key} is {value!r:.60}; it must be a whole number from 1 to {_LARGEST_INT}")


def _check_positive(key: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LARGEST_FLOAT:
        raise ConfigError(f"{key} is {value!r:.60}; it must be a finite number above 0")


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
    if params.get("vocab_size") == -1:
        if vocab_size is None:
            raise ConfigError(f"{source}: vocab_size is -1 and there is no embedding to take it from")
        params = {**params, "vocab_size": vocab_size}
    keys = _Keys(params, source)
    dim, n_layers, n_heads = keys.whole("dim"), keys.whole("n_layers"), keys.whole("n_heads")
    if dim % n_heads:
        raise ConfigError(f"{source}: dim {dim} is not a multiple of n_heads {n_heads}")
    multiplier = keys.positive("ffn_dim_multiplier", 1.0)
    scaling = None
    if keys.flag("use_scaled_rope"):
        factor = 32.0 if (dim, n_layers) in ((2048, 16), (3072, 28)) else 8.0
        scaling = RopeScaling(factor if rope_factor is None else rope_factor)
    return _made(
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
    keys = _Keys(config, source)
    keys.need("model_type")
    _check_hf_keys(config, source)
    dim, n_heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    if config.get("head_dim") is None and dim % n_heads:
        raise ConfigError(f"{source}: hidden_size {dim} is not a multiple of num_attention_heads {n_heads}")
    theta, scaling = _hf_rope(config, source)
    return _made(
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
        if any(word in key.lower() for word in _HF_SUSPECT):
            raise ConfigError(f"{source}: unknown key {key!r} = {config[key]!r}; it may change what the model computes")
    if unknown:
        log.warning("%s: keys ignored: %s", source, ", ".join(sorted(unknown)))


def _hf_rope(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """RoPE from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old), or from both if they agree."""
    groups = [(key, config[key]) for key in ("rope_scaling", "rope_parameters") if config.get(key) is not None]
    for key, group in groups:
        if not isinstance(group, Mapping):
            raise ConfigError(f"{source}: {key} is {group!r:.60}, must be an object or null")
    places = [_Keys(config, source), *(_Keys(group, f"{source}: {key}") for key, group in groups)]
    thetas = {keys.positive("rope_theta") for keys in places if keys.mapping.get("rope_theta") is not None}
    if not thetas:
        raise ConfigError(f"{source}: missing rope_theta (looked for it beside and inside rope_parameters)")
    if len(thetas) > 1:
        raise ConfigError(f"{source}: rope_theta is given as {' and as '.join(map(str, sorted(thetas)))}")
    readings = [_hf_scaling(keys) for keys in places[1:] if keys.mapping]
    if any(r != readings[0] for r in readings):
        raise ConfigError(f"{source}: rope_scaling and rope_parameters contradict each other")
    return thetas.pop(), readings[0] if readings else None


def _hf_scaling(keys: "_Keys") -> RopeScaling | None:
    kind = keys.mapping.get("rope_type", keys.mapping.get("type", "default"))
    if (part := keys.mapping.get("partial_rotary_factor")) not in (None, 1):
        raise ConfigError(f"{keys.source}: partial_rotary_factor is {part!r}, must be 1: Llama 3 rotates whole heads")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"{keys.source}: rope_type is {kind!r}; this program knows 'default' and 'llama3'")
    return _made(
        RopeScaling,
        keys.source,
        factor=keys.positive("factor"),
        low_freq_factor=keys.positive("low_freq_factor"),
        high_freq_factor=keys.positive("high_freq_factor"),
        original_max_position=keys.whole("original_max_position_embeddings"),
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
    """One JSON object from a file. Raises `UserError` naming it if it is missing, unreadable or something else."""
    value = parse_json(read_bytes(path), path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class _Keys:
    """The values of a configuration, each of the kind that is asked for; errors name the file and the key."""

    def __init__(self, mapping: Mapping[str, Any], source: str) -> None:
        self.mapping, self.source = mapping, source

    def need(self, key: str, default: Any = None) -> Any:
        value = self.mapping.get(key)
        if value is None and default is None:
            raise ConfigError(f"{self.source}: missing key {key!r}")
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.need(key, default)
        _check_whole(f"{self.source}: {key}", value)
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.need(key, default)
        _check_positive(f"{self.source}: {key}", value)
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.need(key, False)
        if type(value) is not bool:
            raise ConfigError(f"{self.source}: {key} is {value!r:.60}; it must be true or false")
        return value


def _made(kind: type[_Made], source: str, **fields: Any) -> _Made:
    """`kind(**fields)`, whose own complaints name the file too."""
    try:
        return kind(**fields)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
