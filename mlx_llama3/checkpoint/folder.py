"""Reading a model folder: Hugging Face names and layout, 16 or 32 bit or quantized as MLX and mlx-lm write it.

Every `mlx-community` Llama 3 folder is one, and so is what `mlx-llama3 convert` writes.
"""

from pathlib import Path
from typing import Any

from mlx_llama3.checkpoint.config_json import from_hf
from mlx_llama3.checkpoint.quantization import Quantization, module_quantization, quantization_settings
from mlx_llama3.checkpoint.tensor_shapes import count_weights, expected_shapes
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import read_json

import mlx.core as mx


class CheckpointError(UserError):
    """A model folder that cannot be loaded: names the file or tensor, what was expected and the way out."""


class Checkpoint:
    """What a model folder holds: `args`, and `weights` by Hugging Face name, not yet read but for their headers.

    Raises:
        UserError: the folder is no model folder; a tensor is missing, unknown or not of the shape that config.json
            means.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        settings = read_settings(self.folder)
        self.args = from_hf(settings, source=str(self.folder / "config.json"))
        self._quantization = quantization_settings(settings, str(self.folder / "config.json"))
        self.weights = _read_weights(self.folder)
        if self.args.tie_word_embeddings:
            self.weights = {name: w for name, w in self.weights.items() if not name.startswith("lm_head.")}
        self._check_shapes()

    def quantization(self, module: str) -> Quantization | None:
        """How the matrix of a module (its Hugging Face name, without `.weight`) is stored; None if dense."""
        if f"{module}.scales" not in self.weights:
            return None
        return module_quantization(self._quantization, module, str(self.folder / "config.json"))

    @property
    def dtype(self) -> mx.Dtype:
        """The floating type of most tensors: of the scales in a quantized folder, of the weights in a dense one."""
        types = [w.dtype for w in self.weights.values() if _is_floating(w)]
        return max(set(types), key=types.count)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as stored."""
        return sum(w.nbytes for w in self.weights.values())

    def nbytes_as(self, dtype: mx.Dtype) -> int:
        """Bytes of all weights with `dtype` for all that is floating; what is packed stays packed."""
        return sum(w.size * (dtype if _is_floating(w) else w.dtype).size for w in self.weights.values())

    @property
    def n_weights(self) -> int:
        """Numbers in all weights, quantized ones unpacked."""
        return count_weights(self.args)

    def check_finite(self) -> None:
        """Raise CheckpointError naming the first tensor with NaN or infinity; a sum finds them in one read."""
        floats = {name: w for name, w in self.weights.items() if _is_floating(w)}
        # float16 sums overflow, and on the CPU 16-bit reductions are slow.
        sums = [mx.sum(w.astype(mx.float32)) for w in floats.values()]
        finite = mx.isfinite(mx.stack(sums)).tolist()
        for name, ok in zip(floats, finite, strict=True):
            if not ok:
                raise not_finite(self.folder, name)

    def take(self, key: str) -> mx.array:
        """A tensor, which is then no longer kept here."""
        return self.weights.pop(key)

    def _check_shapes(self) -> None:
        unknown = set(self.weights)
        if self.args.n_layers > len(unknown):  # before a list of all of them is made, which may not end
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
            raise CheckpointError(f"{self.folder}: tensor {key} is missing; download or convert the model again")
        tensor = self.weights[key]
        if tensor.shape != shape:
            raise CheckpointError(f"{self.folder}: tensor {key} has shape {tensor.shape}, config.json means {shape}")
        # Integers in the place of numbers, and float8, which MLX reads as bytes, would load and mean nothing.
        if packed == _is_floating(tensor):
            kind = str(tensor.dtype).removeprefix("mlx.core.")
            expected = "packed integers" if packed else "float16, bfloat16 or float32"
            raise CheckpointError(f"{self.folder}: tensor {key} is {kind}; expected {expected}")


def not_finite(folder: Path, key: str) -> CheckpointError:
    """The error for a tensor with NaN or infinity."""
    return CheckpointError(f"{folder}: tensor {key} holds NaN or infinity; download or convert the model again")


def _is_floating(tensor: mx.array) -> bool:
    return mx.issubdtype(tensor.dtype, mx.floating)


def _stored_shapes(name: str, shape: tuple[int, ...], quantization: Quantization | None) -> dict[str, tuple[int, ...]]:
    """A dense tensor is one; a quantized one is packed words, scales and (affine) biases."""
    if quantization is None:
        return {name: shape}
    module = name.removesuffix(".weight")
    rows, columns = shape
    grouped = (rows, columns // quantization.group_size)
    shapes = {name: (rows, columns * quantization.bits // 32), f"{module}.scales": grouped}
    if quantization.mode == "affine":
        shapes[f"{module}.biases"] = grouped
    return shapes


def read_settings(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder; raises CheckpointError that says what the folder is instead, if it has none."""
    if not folder.is_dir():
        kind = "a file, not a folder" if folder.exists() else "no such folder"
        hint = f"; convert it first: mlx-llama3 convert {folder} TARGET" if folder.suffix == ".gguf" else ""
        raise CheckpointError(f"{folder}: {kind}; expected a model folder with config.json and safetensors{hint}")
    if not (folder / "config.json").exists():
        convertible = (folder / "params.json").exists() or any(folder.glob("*.gguf")) or any(folder.glob("*.pth"))
        hint = (
            f"convert it first: mlx-llama3 convert {folder} TARGET"
            if convertible
            else "name a folder that mlx-llama3 convert or mlx-lm wrote, or a Hugging Face download"
        )
        raise CheckpointError(f"{folder}: no config.json, so this is no model folder; {hint}")
    return read_json(folder / "config.json")


def _read_weights(folder: Path) -> dict[str, mx.array]:
    """All tensors, lazily: nothing but headers is read yet. Other sets of weights in the folder are left alone."""
    weights: dict[str, mx.array] = {}
    for path in weight_files(folder):
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
    """The files of a model folder that hold its weights; `CheckpointError` if there are none, or one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return indexed_files(index)
    paths = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("weights*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder}: no model*.safetensors; convert it first: mlx-llama3 convert {folder} TARGET")
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
