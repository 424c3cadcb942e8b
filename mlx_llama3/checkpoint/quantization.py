"""The quantization of the matrices of a model folder: the `quantization` object of its `config.json`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_llama3.model.config import ConfigError

# MLX's quantization formats: mode -> bits, group sizes.
_FORMATS = {
    "affine": ((1, 2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
# Bits and group size where a setting is absent or null (mlx.nn, `QuantizedLinear`).
_DEFAULTS = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
# The tensors of a dense model end so.
_DENSE = (".weight", ".inv_freq")


@dataclass(frozen=True)
class Quantization:
    """A matrix's quantization: `mode` (affine, mxfp4, ...), `bits` per weight, `group_size` weights per scale."""

    bits: int
    group_size: int
    mode: str = "affine"


def quantization_settings(config: Mapping[str, Any], names: Iterable[str], source: str) -> Mapping[str, Any]:
    """The `quantization` object: defaults, and overrides by module name. Empty for a dense model.

    names: of the stored tensors. A `quantization_config` of another program is left over if all of them are dense.
    source: the file, for errors.
    Raises `ConfigError` for a model that was quantized by another program than MLX.
    """
    ours, foreign = config.get("quantization"), config.get("quantization_config")
    if ours and not isinstance(ours, Mapping):
        raise ConfigError(f"{source}: quantization is {ours!r:.60}, must be an object or null")
    if foreign and not ours and not all(name.endswith(_DENSE) for name in names):
        method = foreign.get("quant_method") if isinstance(foreign, Mapping) else foreign
        raise ConfigError(f"{source}: quantized with {method!r:.60}, which MLX cannot read; take the 16-bit model")
    return ours or {}


def module_quantization(settings: Mapping[str, Any], module: str, source: str) -> Quantization:
    """The quantization of the matrix of `module` (its Hugging Face name, without `.weight`).

    settings: from `quantization_settings`. source: the file, for errors.
    Raises `ConfigError` for a format that MLX does not have.
    """
    # As in mlx-lm, a module's own settings replace the others, and what they leave out has MLX's default.
    own = settings.get(module)
    merged = own if isinstance(own, Mapping) else settings
    if not merged:
        raise ConfigError(f"{source}: quantization: no bits and group_size for {module}, which has scales")
    mode = str(merged.get("mode") or "affine")
    defaults = _DEFAULTS.get(mode, (None, None))
    bits, group_size = (
        default if merged.get(key) is None else merged[key]
        for key, default in zip(("bits", "group_size"), defaults, strict=True)
    )
    known_bits, known_sizes = _FORMATS.get(mode, ((), ()))
    is_known = bits in known_bits and group_size in known_sizes and type(bits) is type(group_size) is int
    if not is_known:
        raise ConfigError(
            f"{source}: quantization of {module}: MLX has no mode {mode!r} with {bits!r} bits and groups of "
            f"{group_size!r}; download or convert the model again"
        )
    return Quantization(bits, group_size, mode)
