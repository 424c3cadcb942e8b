"""Hugging Face folders: `config.json` and weights as safetensors or torch files, dense or already quantized by MLX."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from convert.sources.source import QuantizedRows, Source, SourceTensor
from convert.sources.tokenizer_files import copy_tokenizer_files, tokenizer_files
from convert.storage.safetensors_reader import read_safetensors
from convert.storage.stored_tensor import WEIGHT_DTYPES, StoredTensor, to_mlx
from convert.storage.torch_zip import read_pth
from mlx_llama3.checkpoint.config_json import from_hf
from mlx_llama3.checkpoint.folder import indexed_files, missing_tensor
from mlx_llama3.checkpoint.quantization import Quantization, module_quantization, quantization_settings
from mlx_llama3.checkpoint.tensor_shapes import expected_shapes
from mlx_llama3.errors import UserError
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.system.files import read_bytes, read_json
from mlx_llama3.tokenizer.tokenizer import load_tokenizer

import mlx.core as mx

# Early versions of mlx-lm named their files "weights".
_SAFETENSORS = re.compile(r"(?:model(?:-\d+-of-(\d+))?|weights(?:\.\d+)?)\.safetensors")
_TORCH = re.compile(r"pytorch_model(?:-\d+-of-(\d+))?\.bin")
_KINDS = ((_SAFETENSORS, "model.safetensors.index.json"), (_TORCH, "pytorch_model.bin.index.json"))
# Tables that older versions of transformers saved with the weights; they follow from config.json.
_DERIVED = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias|attn\.bias)")

_WEIGHTS = (".safetensors", ".bin", ".pth", ".gguf")
_NO_TOKENIZER = "no tokenizer.json in the source: the new folder runs, but not on text"


def weight_files(folder: Path) -> list[Path]:
    """The weight files to read: safetensors if there are any, else torch files. Empty if there are none.

    Raises `UserError` if the index names a file that is missing, or if some of the numbered files are missing.
    """
    for pattern, index_name in _KINDS:
        names = sorted(path.name for path in folder.iterdir() if pattern.fullmatch(path.name))
        if (folder / index_name).exists():
            names = [path.name for path in indexed_files(folder / index_name)]
        if names:
            _check_complete(folder, names, pattern)
            return [folder / name for name in names]
    return []


def open_huggingface(folder: Path) -> Source:
    """Open a folder that transformers or mlx-lm wrote; only headers are read.

    Raises `UserError` if a file or tensor is missing, a tensor is unknown, duplicated or of the wrong shape or dtype,
    or the weights are quantized in a format that MLX does not read.
    """
    config = read_json(folder / "config.json")
    source = str(folder / "config.json")
    args = from_hf(config, source=source)
    files = weight_files(folder)
    stored = _read_files(files)
    quantization = quantization_settings(config, stored, source)
    tensors = _source_tensors(args, stored, quantization, folder)
    kind = "torch" if files[0].suffix == ".bin" else "safetensors"
    tokenizer = tokenizer_files(folder)
    has_tokenizer = any(name in tokenizer for name in ("tokenizer.json", "tokenizer.model"))
    writer = "MLX-quantized" if quantization else "Hugging Face"
    return Source(
        path=folder,
        kind=f"{writer} folder, {len(files)} {kind} file{'s' if len(files) > 1 else ''}",
        args=args,
        tensors=tensors,
        generation_config=_generation_config(folder, config),
        write_tokenizer=partial(copy_tokenizer_files, folder) if has_tokenizer else lambda target: [],
        notes=[*_ignored(folder, files), *(_tokenizer_notes(folder, tokenizer) if has_tokenizer else [_NO_TOKENIZER])],
        files=[folder / "config.json", *files, *(folder / name for name in tokenizer)],
    )


def _check_complete(folder: Path, names: Sequence[str], pattern: re.Pattern[str]) -> None:
    totals = {int(match[1]) for name in names if (match := pattern.fullmatch(name)) and match[1]}
    if len(totals) > 1 or (totals and totals != {len(names)}):
        raise UserError(f"{folder}: {len(names)} of {max(totals)} numbered weight files are there; fetch the rest")


def _ignored(folder: Path, files: Sequence[Path]) -> list[str]:
    """A note that names the other weights in the folder; an empty list if there are none."""
    others = sorted(
        path.name
        for path in folder.iterdir()
        if path not in files and path.suffix in _WEIGHTS and path.name[0] != "." and path.is_file()
    )
    if (folder / "original").is_dir():
        others.append("original/")
    shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
    return (
        [f"read {files[0].name}{' ...' if files[1:] else ''}; ignored {shown}, other weights beside it"]
        if others
        else []
    )


def _generation_config(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json, completed with the token ids of config.json."""
    path = folder / "generation_config.json"
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    ids |= read_json(path) if path.exists() else {}
    for key, value in ids.items():
        numbers = value if isinstance(value, list) else [value]
        if key.endswith("_token_id") and not all(number is None or type(number) is int for number in numbers):
            raise UserError(
                f"{folder}: {key} is {value!r:.60} in its configuration, expected a token's number or a list"
            )
    return ids


def _tokenizer_notes(folder: Path, names: Sequence[str]) -> list[str]:
    """A note if the tokenizer cannot be used here, which mlx-lm may still do; `UserError` if a file cannot be read."""
    for name in names:
        read_bytes(folder / name, 64)
    try:
        load_tokenizer(folder)
    except UserError as error:
        return [f"{error}; the new folder runs here, but not on text"]
    return []


def _read_files(files: Sequence[Path]) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for path in files:
        tensors = read_pth(path) if path.suffix == ".bin" else read_safetensors(path)[0]
        for name, tensor in tensors.items():
            if name in stored:
                raise UserError(
                    f"{path}: {name} is in {stored[name].path.name} too; remove the file that does not belong"
                )
            stored[name] = tensor
    return {name: tensor for name, tensor in stored.items() if not _DERIVED.fullmatch(name)}


def _source_tensors(
    args: ModelArgs, stored: dict[str, StoredTensor], quantization: Mapping[str, Any], folder: Path
) -> dict[str, SourceTensor]:
    """The tensors in the order of the forward pass, each checked against the shape that config.json implies."""
    unused = dict(stored)
    tensors = {}
    for name, shape in expected_shapes(args).items():
        weight = unused.pop(name, None)
        if weight is None:
            raise UserError(missing_tensor(folder, name, stored))
        module = name.removesuffix(".weight")
        scales, biases = unused.pop(f"{module}.scales", None), unused.pop(f"{module}.biases", None)
        if scales is None:
            tensors[name] = _dense(name, shape, weight)
        else:
            own = module_quantization(quantization, module, str(folder / "config.json"))
            tensors[name] = _packed(name, shape, weight, scales, biases, own)
    if args.tie_word_embeddings:
        unused = {name: tensor for name, tensor in unused.items() if not name.startswith("lm_head.")}
    for name, tensor in unused.items():
        raise UserError(f"{tensor.path}: tensor {name[:100]!r} is not part of a Llama 3 text model of this config.json")
    return tensors


def _check_shape(tensor: StoredTensor, expected: tuple[int, ...], dtypes: Sequence[str]) -> None:
    if tensor.dtype not in dtypes:
        raise UserError(
            f"{tensor.path}: {tensor.name} is stored as {tensor.dtype}, expected {' or '.join(dtypes)}; "
            "convert the 16-bit model"
        )
    if tensor.shape != expected:
        raise UserError(f"{tensor.path}: {tensor.name} has shape {tensor.shape}, config.json means {expected}")


def _dense(name: str, shape: tuple[int, ...], weight: StoredTensor) -> SourceTensor:
    _check_shape(weight, shape, WEIGHT_DTYPES)
    return SourceTensor(
        name=name,
        shape=shape,
        dtype=weight.mx_dtype,
        origin=weight.origin,
        rows=lambda start, stop: to_mlx(weight.rows(start, stop), weight.mx_dtype),
        checksums=(weight.checksum,) if weight.checksum else (),
    )


def _packed(
    name: str,
    shape: tuple[int, ...],
    weight: StoredTensor,
    scales: StoredTensor,
    biases: StoredTensor | None,
    quantization: Quantization,
) -> SourceTensor:
    rows, columns = shape
    affine = quantization.mode == "affine"
    grouped = (rows, columns // quantization.group_size)
    _check_shape(weight, (rows, columns * quantization.bits // 32), ("U32",))
    _check_shape(scales, grouped, WEIGHT_DTYPES if affine else ("U8",))
    if affine != (biases is not None):
        fault = "lacks its biases" if affine else f"has biases in mode {quantization.mode}"
        raise UserError(f"{scales.path}: {scales.name} {fault}")
    if biases:
        _check_shape(biases, grouped, (scales.dtype,))

    def packed(start: int, stop: int) -> QuantizedRows:
        parts = [to_mlx(part.rows(start, stop), part.mx_dtype) for part in (weight, scales, biases) if part]
        return QuantizedRows(*parts)

    def dense(start: int, stop: int) -> mx.array:
        part = packed(start, stop)
        # In float32, because 16-bit arithmetic would round twice.
        factors = [array.astype(mx.float32) for array in (part.scales, part.biases)] if affine else [part.scales]
        settings = {"group_size": quantization.group_size, "bits": quantization.bits, "mode": quantization.mode}
        return mx.dequantize(part.weight, *factors, **settings, dtype=mx.float32)

    dtype = scales.mx_dtype if affine else mx.bfloat16
    return SourceTensor(name, shape, dtype, weight.origin, dense, quantization, packed)
