"""Reads LoRA adapters, in PEFT's format or mlx-lm's, into one table of low-rank updates."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convert.storage.safetensors_reader import read_safetensors
from convert.storage.stored_tensor import WEIGHT_DTYPES, StoredTensor, to_mlx
from convert.storage.torch_zip import read_pth
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import read_json

import mlx.core as mx

# PEFT's names: `base_model.model.` + module + part. The adapter's name, if it is there, is "default".
_PEFT = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\.(?P<part>lora_embedding_[AB]|lora_[AB]|lora_magnitude_vector)"
    r"(?:\.default)?(?:\.weight)?"
)
_PEFT_WHOLE = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)(?P<base>\.base_layer)?(?:\.modules_to_save(?:\.default)?)?\.weight"
)
_MLX = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
# Settings of adapters that are more than low-rank updates; they must be absent, null, false or empty.
_PEFT_FOREIGN = (
    "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens",
    "trainable_token_indices", "arrow_config", "monteclora_config", "kasa_config", "velora_config", "target_parameters",
)  # fmt: skip
_LARGEST = 3.4e38
# Initializations that do not change the base model, unlike PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA.
_PEFT_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoRAUpdate:
    """The update of one module's matrix, (rows, columns), applied in this order.

    `whole`, if not None, replaces the matrix. `scale * left @ right` is added: `left(start, stop)` returns
    (stop - start, rank), `right()` (rank, columns), both float32. For DoRA each row is then scaled to the L2 norm
    `magnitude(start, stop)`, (stop - start,).
    """

    rank: int = 0
    scale: float = 0.0
    left: Callable[[int, int], mx.array] | None = None
    right: Callable[[], mx.array] | None = None
    magnitude: Callable[[int, int], mx.array] | None = None
    whole: StoredTensor | None = None
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Adapter:
    """The updates by module (Hugging Face name without `.weight`), and the file that holds them.

    `keeps_ties`: an update of the embedding changes the head that is tied to it too.
    """

    updates: Mapping[str, LoRAUpdate]
    file: Path
    keeps_ties: bool


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter's updates. Only headers are read.

    `folder` must hold adapter_config.json and PEFT's `adapter_model.safetensors` (or `.bin`) or mlx-lm's
    `adapters.safetensors`. Raises `UserError` if it does not, and for adapters that cannot be fused exactly.
    """
    config = read_json(folder / "adapter_config.json")
    candidates = (folder / f"adapter_model.{suffix}" for suffix in ("safetensors", "bin"))
    peft = next(filter(Path.exists, candidates), None)
    if peft is not None:
        stored = read_pth(peft) if peft.suffix == ".bin" else read_safetensors(peft)[0]
        return Adapter(_read_peft(config, stored, peft), peft, bool(config.get("ensure_weight_tying")))
    path = folder / "adapters.safetensors"
    if not path.exists():
        raise UserError(f"{folder}: no adapter_model.safetensors (PEFT) and no adapters.safetensors (mlx-lm)")
    return Adapter(_read_mlx(config, read_safetensors(path)[0], path), path, keeps_ties=True)


def _read_peft(config: Mapping[str, Any], stored: Mapping[str, StoredTensor], path: Path) -> dict[str, LoRAUpdate]:
    where = path.with_name("adapter_config.json")
    if config.get("peft_type") != "LORA":
        raise UserError(f"{where}: peft_type is {config.get('peft_type')!r}; only LORA is fused")
    for key in _PEFT_FOREIGN:
        if config.get(key):
            raise UserError(f"{where}: {key} is set; such an adapter cannot be fused exactly")
    if config.get("init_lora_weights", True) not in _PEFT_INITIALIZATIONS:
        raise UserError(
            f"{where}: init_lora_weights {config['init_lora_weights']!r} changes the base model; "
            "save the adapter converted to LoRA (path_initial_model_for_weight_conversion)"
        )
    parts_by_module, wholes = _group_parts(stored, _PEFT)
    updates = {module: _peft_update(module, parts, config, path) for module, parts in parts_by_module.items()}
    for name, tensor in wholes.items():
        match = _PEFT_WHOLE.fullmatch(name)
        # PEFT also saves the base weight of an embedding that it trained an update for.
        update = updates.get(match["module"]) if match else None
        if match is None or (update is not None) != (match["base"] is not None):
            raise UserError(f"{path}: {name[:100]!r} is neither part of a low-rank update nor a whole weight")
        if update and update.shape != tensor.shape:
            raise UserError(f"{path}: {name[:100]!r} is {tensor.shape}, its update {update.shape}; fetch it again")
        updates[match["module"]] = replace(update or LoRAUpdate(shape=tensor.shape), whole=tensor)
    return updates


def _group_parts(
    stored: Mapping[str, StoredTensor], pattern: re.Pattern[str]
) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, StoredTensor]]:
    """The tensors whose names match `pattern`, by module and part; and all others by name."""
    parts_by_module: dict[str, dict[str, StoredTensor]] = {}
    others = {}
    for name, tensor in stored.items():
        if tensor.dtype not in WEIGHT_DTYPES:
            raise UserError(f"{tensor.path}: {name[:100]!r} is stored as {tensor.dtype}, expected F32, F16 or BF16")
        if match := pattern.fullmatch(name):
            parts_by_module.setdefault(match["module"], {})[match["part"]] = tensor
        else:
            others[name] = tensor
    return parts_by_module, others


def _peft_update(module: str, parts: Mapping[str, StoredTensor], config: Mapping[str, Any], path: Path) -> LoRAUpdate:
    magnitude = parts.get("lora_magnitude_vector")
    embedding = "lora_embedding_A" in parts
    a, b = (parts.get(f"lora_{'embedding_' if embedding else ''}{side}") for side in "AB")
    if embedding and magnitude:
        raise UserError(f"{path}: DoRA on the embedding {module} is not fused")
    # The update of a linear layer is B A, (rows, rank) (rank, columns); that of an embedding (B A)^T, a row per token.
    left, right = (a, b) if embedding else (b, a)
    _check_pair(left, right, module, path)
    rank = (a if a is not None else b).shape[0]
    alpha = _match_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8), path)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return _update(left, right, magnitude, rank, scale, transposed=embedding, module=module)


def _check_pair(left: StoredTensor | None, right: StoredTensor | None, module: str, path: Path) -> None:
    if left is None or right is None or len(left.shape) != 2 or len(right.shape) != 2 or 0 in left.shape + right.shape:
        raise UserError(
            f"{path}: {module} lacks one of its two low-rank matrices, or it is empty; fetch the adapter again"
        )


def _match_pattern(patterns: Any, module: str, default: Any, path: Path) -> float:
    """The value for `module` in PEFT's `alpha_pattern`, or `default`.

    A key must be a module's name or the end of one; PEFT allows any regular expression.
    """
    value, where = default, path.with_name("adapter_config.json")
    if patterns and not isinstance(patterns, Mapping):
        raise UserError(f"{where}: alpha_pattern is {patterns!r:.60}, expected an object: module name to number")
    for key, override in (patterns or {}).items():
        plain = key.removeprefix("^").replace("\\.", ".")
        if not re.fullmatch(r"[\w.]+", plain):
            raise UserError(f"{where}: the pattern {key[:80]!r} is not a module's name")
        if module == plain or (not key.startswith("^") and module.endswith(f".{plain}")):
            value = override
            break
    if not _is_number(value):
        raise UserError(f"{where}: lora_alpha of {module} is {value!r:.60}, expected a finite number")
    return float(value)


def _is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a finite number that float32 holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _read_mlx(config: Mapping[str, Any], stored: Mapping[str, StoredTensor], path: Path) -> dict[str, LoRAUpdate]:
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        return {
            name.removesuffix(".weight"): LoRAUpdate(whole=tensor, shape=tensor.shape)
            for name, tensor in stored.items()
        }
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, Mapping) else None
    if kind not in ("lora", "dora") or not _is_number(scale):
        raise UserError(f"{path.with_name('adapter_config.json')}: expected fine_tune_type and lora_parameters.scale")
    parts_by_module, others = _group_parts(stored, _MLX)
    for name in others:
        raise UserError(f"{path}: {name[:100]!r} is not part of a low-rank update")
    return {module: _mlx_update(module, parts, float(scale), path) for module, parts in parts_by_module.items()}


def _mlx_update(module: str, parts: Mapping[str, StoredTensor], scale: float, path: Path) -> LoRAUpdate:
    a, b = parts.get("lora_a"), parts.get("lora_b")
    # A linear layer computes (x a) b, so the update of its matrix is (a b)^T; that of an embedding table is a b.
    embedding = module.endswith("embed_tokens")
    left, right = (a, b) if embedding else (b, a)
    _check_pair(left, right, module, path)
    return _update(left, right, parts.get("m"), b.shape[0], scale, transposed=not embedding, module=module)


def _update(
    left: StoredTensor,
    right: StoredTensor,
    magnitude: StoredTensor | None,
    rank: int,
    scale: float,
    *,
    transposed: bool,
    module: str,
) -> LoRAUpdate:
    """Build the update from its stored factors, (rows, rank) and (rank, columns), or `transposed`."""
    left_shape, right_shape = (left.shape[::-1], right.shape[::-1]) if transposed else (left.shape, right.shape)
    shape = (left_shape[0], right_shape[1])
    if left_shape[1] != rank or right_shape[0] != rank or (magnitude and magnitude.shape != shape[:1]):
        raise UserError(f"{left.path}: the shapes {left.shape} and {right.shape} of {module} do not fit each other")
    return LoRAUpdate(
        rank=rank,
        scale=scale,
        left=lambda start, stop: _whole_float32(left).T[start:stop] if transposed else _float32(left, start, stop),
        right=lambda: _whole_float32(right).T if transposed else _whole_float32(right),
        magnitude=(lambda start, stop: _float32(magnitude, start, stop)) if magnitude else None,
        shape=shape,
    )


def _float32(tensor: StoredTensor, start: int, stop: int) -> mx.array:
    return to_mlx(tensor.rows(start, stop), tensor.mx_dtype).astype(mx.float32)


def _whole_float32(tensor: StoredTensor) -> mx.array:
    return _float32(tensor, 0, tensor.shape[0])
