"""Reads a model folder: Hugging Face names and layout; 16 or 32 bits, or quantized as MLX and mlx-lm write it.

A model folder is any `mlx-community` Llama 3 repository, or what `mlx-llama3 convert` writes.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlx_llama3.checkpoint.config_json import from_hf
from mlx_llama3.checkpoint.quantization import Quantization, module_quantization, quantization_settings
from mlx_llama3.checkpoint.tensor_shapes import count_weights, expected_shapes
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import check_weights_file, read_json

import mlx.core as mx


class CheckpointError(UserError):
    """A model folder cannot be loaded. The message names the file or tensor, what was expected, and what to do."""


class Checkpoint:
    """The contents of a model folder: `args`, and `weights` by Hugging Face name, lazy (only headers are read).

    Raises:
        UserError: the folder is no model folder; a tensor is missing, unknown, or not of the shape that config.json
            implies.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        settings = read_settings(self.folder)
        self.args = from_hf(settings, source=str(self.folder / "config.json"))
        self.weights = _read_weights(self.folder)
        self._quantization = quantization_settings(settings, self.weights, str(self.folder / "config.json"))
        if self.args.tie_word_embeddings:
            self.weights = {name: w for name, w in self.weights.items() if not name.startswith("lm_head.")}
        self._check_shapes()

    def quantization(self, module: str) -> Quantization | None:
        """The quantization of a module's matrix (Hugging Face name, without `.weight`); None if it is dense."""
        if f"{module}.scales" not in self.weights:
            return None
        return module_quantization(self._quantization, module, str(self.folder / "config.json"))

    @property
    def dtype(self) -> mx.Dtype:
        """The most common floating-point dtype: the scales' in a quantized folder, the weights' in a dense one."""
        types = [w.dtype for w in self.weights.values() if _is_floating(w)]
        return max(set(types), key=types.count)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as stored."""
        return sum(w.nbytes for w in self.weights.values())

    def nbytes_as(self, dtype: mx.Dtype) -> int:
        """Bytes of all weights with the floating-point ones in `dtype`, and the packed ones as they are."""
        return sum(w.size * (dtype if _is_floating(w) else w.dtype).size for w in self.weights.values())

    @property
    def n_weights(self) -> int:
        """The number of weights, quantized ones counted unpacked."""
        return count_weights(self.args)

    def check_finite(self) -> None:
        """Raise CheckpointError for the first tensor with NaN or infinity, which a sum detects in one read."""
        floats = {name: w for name, w in self.weights.items() if _is_floating(w)}
        # float16 sums overflow, and on the CPU 16-bit reductions are slow.
        sums = [mx.sum(w.astype(mx.float32)) for w in floats.values()]
        finite = mx.isfinite(mx.stack(sums)).tolist()
        for name, ok in zip(floats, finite, strict=True):
            if not ok:
                raise not_finite(self.folder, name)

    def pop(self, key: str) -> mx.array:
        """Remove a tensor from `weights` and return it."""
        return self.weights.pop(key)

    def _check_shapes(self) -> None:
        unknown = set(self.weights)
        if self.args.n_layers > len(unknown):  # before the list of all expected tensors, which may be endless, is built
            raise CheckpointError(
                f"{self.folder}: config.json means {self.args.n_layers} layers, the files hold {len(unknown)} tensors"
            )
        for name, shape in expected_shapes(self.args).items():
            quantization = self.quantization(name.removesuffix(".weight"))
            for key, stored in _stored_shapes(name, shape, quantization).items():
                self._check_tensor(
                    key, stored, packed=quantization is not None and (key == name or quantization.mode != "affine")
                )
                unknown.discard(key)
        if unknown:
            raise CheckpointError(
                f"{self.folder}: tensor {min(unknown)} is not part of the Llama 3 model that config.json means"
            )

    def _check_tensor(self, key: str, shape: tuple[int, ...], *, packed: bool) -> None:
        if key not in self.weights:
            raise CheckpointError(missing_tensor(self.folder, key, self.weights))
        tensor = self.weights[key]
        if tensor.shape != shape:
            raise CheckpointError(f"{self.folder}: tensor {key} has shape {tensor.shape}, config.json means {shape}")
        # Integers instead of floats, or float8, which MLX reads as bytes, would load, but their values would be wrong.
        if packed == _is_floating(tensor):
            kind = str(tensor.dtype).removeprefix("mlx.core.")
            expected = "packed integers" if packed else "float16, bfloat16 or float32"
            raise CheckpointError(f"{self.folder}: tensor {key} is {kind}; expected {expected}")


def missing_tensor(folder: Path, name: str, stored: Iterable[str]) -> str:
    """The sentence for a tensor that is not there; it shows the name that is, if that has a prefix more."""
    for other in stored:
        if other != name and other.endswith(f".{name}"):
            prefix = other.removesuffix(name)
            return f"{folder}: tensor {name} is named {other[:200]} here; save the model anew without {prefix[:100]!r}"
    return f"{folder}: tensor {name} is missing; download or convert the model again"


def not_finite(folder: Path, key: str) -> CheckpointError:
    """The error for a tensor with NaN or infinity."""
    return CheckpointError(f"{folder}: tensor {key} holds NaN or infinity; download or convert the model again")


def _is_floating(tensor: mx.array) -> bool:
    return mx.issubdtype(tensor.dtype, mx.floating)


def _stored_shapes(name: str, shape: tuple[int, ...], quantization: Quantization | None) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a tensor's stored arrays: itself if dense; packed words, scales and affine biases if not."""
    if quantization is None:
        return {name: shape}
    module = name.removesuffix(".weight")
    rows, columns = shape
    grouped = (rows, columns // quantization.group_size)
    shapes: dict[str, tuple[int, ...]] = {name: (rows, columns * quantization.bits // 32), f"{module}.scales": grouped}
    if quantization.mode == "affine":
        shapes[f"{module}.biases"] = grouped
    return shapes


def read_settings(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model folder. Raises CheckpointError if it has none, and says how to get one."""
    if not folder.is_dir():
        kind = "a file, not a folder" if folder.exists() else "no such folder"
        hint = f"; convert it first: mlx-llama3 convert {folder} TARGET" if folder.suffix == ".gguf" else ""
        raise CheckpointError(f"{folder}: {kind}; expected a model folder with config.json and safetensors{hint}")
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: no config.json, so this is no model folder; {_way_out(folder)}")
    return read_json(folder / "config.json")


def adapter_hint(folder: Path) -> str | None:
    """What to do with a folder that holds an adapter and no model; None for any other folder."""
    weights = ("adapters.safetensors", "adapter_model.safetensors", "adapter_model.bin")
    if not any((folder / name).exists() for name in ("adapter_config.json", *weights)):
        return None
    return f"it holds an adapter: fuse it into its model with `mlx-llama3 convert MODEL TARGET --adapter {folder}`"


def misnamed_hint(folder: Path) -> str | None:
    """What to do with safetensors under names that no reader of model folders looks for; None if there are none."""
    names = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    expected = "model.safetensors, or model-00001-of-0000N.safetensors ..."
    return f"{names[0]} has another name than the weights of a model: rename it to {expected}" if names else None


def _way_out(folder: Path) -> str:
    """What to do with a folder from which no weights are loaded."""
    names = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    beside = {"consolidated": "params.json", "pytorch_model": "config.json"}
    weights = {stem for stem in beside for name in names if name.startswith(stem)}
    if any(name.lower().endswith(".gguf") for name in names) or any(beside[stem] in names for stem in weights):
        return f"convert it first: mlx-llama3 convert {folder} TARGET"
    other = "name a folder that mlx-llama3 convert or mlx-lm wrote, or a Hugging Face download"
    return adapter_hint(folder) or misnamed_hint(folder) or other


def _read_weights(folder: Path) -> dict[str, mx.array]:
    """All tensors, lazy: only headers are read. Other sets of weights in the folder are ignored."""
    weights: dict[str, mx.array] = {}
    for path in weight_files(folder):
        check_weights_file(path)
        try:
            tensors = mx.load(str(path))
        except RuntimeError as error:
            raise CheckpointError(
                f"{path}: cannot be read as safetensors: {error}; download or convert it again"
            ) from None
        for name in tensors.keys() & weights.keys():
            raise CheckpointError(f"{path}: tensor {name} is in another file of this folder too")
        weights |= tensors
    return {name: w for name, w in weights.items() if not name.endswith("rotary_emb.inv_freq")}


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model folder. Raises `CheckpointError` if there are none, or if one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return indexed_files(index)
    paths = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("weights*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder}: no model*.safetensors; {_way_out(folder)}")
    return paths


def indexed_files(index: Path) -> list[Path]:
    """The files that an index (`*.index.json`) names, which all lie beside it. Raises `CheckpointError`."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index}: no weight_map; download or convert the model again")
    paths = [index.with_name(Path(name).name or "?") for name in sorted(set(names.values()))]
    for path, name in zip(paths, sorted(set(names.values())), strict=True):
        if path.name != name:
            raise CheckpointError(f"{index}: names {name[:100]!r}, which is not a file beside it")
        if not path.exists():
            raise CheckpointError(f"{path}: missing, though {index.name} names it; download or convert the model again")
    return paths
