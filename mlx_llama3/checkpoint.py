"""Reading a model folder: Hugging Face names and layout, 16 or 32 bit or quantized as MLX and mlx-lm write it.

Every `mlx-community` Llama 3 folder is one, and so is what `mlx-llama3 convert` writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_llama3 import config as configuration
from mlx_llama3.errors import UserError
from mlx_llama3.shapes import expected_shapes


class CheckpointError(UserError):
    """A model folder that cannot be loaded: names the file or tensor, what was expected and the way out."""


@dataclass(frozen=True)
class Quantization:
    """How one matrix is stored: `mode` affine, mxfp4, ...; `bits` a weight; `group_size` weights share a scale."""

    bits: int
    group_size: int
    mode: str = "affine"


class Checkpoint:
    """What a model folder holds: `args`, and `weights` by Hugging Face name, not yet read but for their headers.

    Raises:
        UserError: the folder is no model folder; a tensor is missing, unknown or not of the shape that config.json
            means.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        settings = read_settings(self.folder)
        self.args = configuration.from_hf(settings, source=str(self.folder / "config.json"))
        self._quantization = _quantization_settings(settings, self.folder)
        self.weights = _read_weights(self.folder)
        if self.args.tie_word_embeddings:
            self.weights = {name: w for name, w in self.weights.items() if not name.startswith("lm_head.")}
        self._check_shapes()

    def quantization(self, module: str) -> Quantization | None:
        """How the matrix of a module (its Hugging Face name, without `.weight`) is stored; None if dense."""
        if f"{module}.scales" not in self.weights:
            return None
        own = self._quantization.get(module)
        settings = {**self._quantization, **own} if isinstance(own, dict) else self._quantization
        try:
            return Quantization(int(settings["bits"]), int(settings["group_size"]), str(settings.get("mode", "affine")))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{self.folder / 'config.json'}: quantization: no bits and group_size for {module}, which has scales"
            ) from None

    @property
    def dtype(self) -> mx.Dtype:
        """The floating type of most tensors: of the scales in a quantized folder, of the weights in a dense one."""
        types = [w.dtype for w in self.weights.values() if mx.issubdtype(w.dtype, mx.floating)]
        return max(set(types), key=types.count)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as stored."""
        return sum(w.nbytes for w in self.weights.values())

    def _check_shapes(self) -> None:
        unknown = set(self.weights)
        for name, shape in expected_shapes(self.args).items():
            for key, expected in self._stored_shapes(name, shape).items():
                if key not in self.weights:
                    raise CheckpointError(
                        f"{self.folder}: tensor {key} is missing; download or convert the model again"
                    )
                found = tuple(self.weights[key].shape)
                if found != expected:
                    raise CheckpointError(
                        f"{self.folder}: tensor {key} has shape {found}, config.json means {expected}"
                    )
                unknown.discard(key)
        if unknown:
            raise CheckpointError(f"{self.folder}: tensor {min(unknown)} is not part of a Llama 3 model")

    def _stored_shapes(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """A dense tensor is one; a quantized one is packed words, scales and (affine) biases."""
        module = name.removesuffix(".weight")
        how = self.quantization(module)
        if how is None:
            return {name: shape}
        rows, columns = shape
        grouped = (rows, columns // how.group_size)
        shapes = {name: (rows, columns * how.bits // 32), f"{module}.scales": grouped}
        if how.mode == "affine":
            shapes[f"{module}.biases"] = grouped
        return shapes


def read_settings(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder; raises CheckpointError that says what the folder is instead, if it has none."""
    if not folder.is_dir():
        kind = "a file, not a folder" if folder.exists() else "no such folder"
        way_out = f"; convert it first: mlx-llama3 convert {folder} TARGET" if folder.suffix == ".gguf" else ""
        raise CheckpointError(f"{folder}: {kind}; expected a model folder with config.json and safetensors{way_out}")
    if not (folder / "config.json").exists():
        convertible = (folder / "params.json").exists() or any(folder.glob("*.gguf")) or any(folder.glob("*.pth"))
        way_out = (
            f"convert it first: mlx-llama3 convert {folder} TARGET"
            if convertible
            else "name a folder that mlx-llama3 convert or mlx-lm wrote, or a Hugging Face download"
        )
        raise CheckpointError(f"{folder}: no config.json, so this is no model folder; {way_out}")
    return configuration.read_json(folder / "config.json")


def _read_weights(folder: Path) -> dict[str, mx.array]:
    """All tensors, lazily: nothing but headers is read yet. Other sets of weights in the folder are left alone."""
    weights: dict[str, mx.array] = {}
    for path in _weight_files(folder):
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


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = configuration.read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{index}: no weight_map; download or convert the model again")
        paths = [folder / Path(name).name for name in sorted(set(names.values()))]
        for path in paths:
            if not path.exists():
                raise CheckpointError(
                    f"{path}: missing, though {index.name} names it; download or convert the model again"
                )
        return paths
    paths = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("weights*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder}: no model*.safetensors; convert it first: mlx-llama3 convert {folder} TARGET")
    return paths


def _quantization_settings(settings: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The `quantization` object of config.json: a default, and overrides by module name."""
    ours, foreign = settings.get("quantization"), settings.get("quantization_config")
    if foreign and not ours:
        method = foreign.get("quant_method", "an unknown method")
        raise CheckpointError(
            f"{folder / 'config.json'}: quantized with {method}, which MLX cannot read; take the 16-bit model"
        )
    return ours or {}
