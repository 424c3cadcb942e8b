"""The hyperparameters of a model, `ModelArgs`.

Each file format has its own reader: Hugging Face's `config.json` in `checkpoint/config_json.py`, Meta's `params.json`
in `convert/sources/params_json.py`, GGUF's metadata in `convert/gguf/config.py`.
"""

from dataclasses import dataclass
from typing import Any

from mlx_llama3.errors import UserError

_LARGEST_INT = 2**31 - 1  # the largest size of an axis in MLX
_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127  # the largest finite float32


class ConfigError(UserError):
    """A configuration that is invalid or not supported; the message names the key, and the file if there is one."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the RoPE wavelengths (Meta `models/llama3/model.py`, `apply_scaling`).

    Wavelengths (in positions) above `original_max_position / low_freq_factor` are multiplied by `factor`. Those below
    `original_max_position / high_freq_factor` stay as they are. Those between are interpolated.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        for key in ("factor", "low_freq_factor", "high_freq_factor"):
            check_positive(key, getattr(self, key))
        check_whole("original_max_position", self.original_max_position)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor {self.low_freq_factor}"
            )


@dataclass(frozen=True)
class ModelArgs:
    """The hyperparameters of a model, named as in Meta's `models/llama3/args.py` where Meta has them.

    `hidden_dim` is the width of the feed-forward layer (14336 for 8B). `head_dim` is the width of one head.
    `max_seq_len` is the number of positions that the model was trained for.
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
            check_whole(key, getattr(self, key))
        for key in ("norm_eps", "rope_theta"):
            check_positive(key, getattr(self, key))
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs")


def llama3_rope_factor(dim: int, n_layers: int) -> float:
    """The factor of Llama 3.1's RoPE scaling, for files that only state whether there is scaling.

    Meta's code has 8, which is right for 3.1 and 3.3. The 3.2 text models were trained with 32 and are recognised by
    their size: 1B has a dim of 2048 and 16 layers, 3B a dim of 3072 and 28 layers.
    """
    return 32.0 if (dim, n_layers) in ((2048, 16), (3072, 28)) else 8.0


def check_whole(key: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is an int from 1 to the largest size of an MLX array."""
    if type(value) is not int or not 1 <= value <= _LARGEST_INT:
        raise ConfigError(f"{key} is {value!r:.60}; it must be a whole number from 1 to {_LARGEST_INT}")


def check_positive(key: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is a number above 0 that is finite in float32."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LARGEST_FLOAT:
        raise ConfigError(f"{key} is {value!r:.60}; it must be a finite number above 0")
