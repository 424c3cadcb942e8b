"""GGUF as a `Source`: Hugging Face names and row order; quantized tensors are repacked in MLX's affine format.

Types in `AFFINE_BITS` are repacked without a change of value; only the scales of Q4_K and Q5_K are rounded to float16,
unless `exact_scales` is set. Q2_K, Q3_K and Q6_K are quantized again to 8 bits, since MLX has no groups of 16. All
others are dense.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from convert.gguf.config import ROPE_FACTORS, args_from_gguf
from convert.gguf.dequantize import (
    AFFINE_BITS,
    AFFINE_GROUP,
    WIDE_SCALES,
    Affine,
    dequantize,
    requantize_8_bit,
    rounding_error,
    to_affine,
)
from convert.gguf.reader import GGUFError, GGUFTensor
from convert.gguf.split_files import GGUFModel, read_gguf
from convert.gguf.types import LAYOUTS
from convert.sources.gguf_tokenizer import read_tokenizer
from convert.sources.source import QuantizedRows, Source, SourceTensor
from convert.sources.unshard import ReadRows, half_split
from convert.storage.stored_tensor import to_mlx
from mlx_llama3.checkpoint.quantization import Quantization
from mlx_llama3.checkpoint.tensor_names import hf_to_gguf
from mlx_llama3.checkpoint.tensor_shapes import expected_shapes
from mlx_llama3.model.config import ModelArgs

import mlx.core as mx

DENSE = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
REQUANTIZED = Quantization(bits=8, group_size=AFFINE_GROUP)
SAMPLE_ROWS = 16
# Rows per comparison of the head with the embedding.
COMPARED_ROWS = 4096


def open_gguf(path: Path, *, exact_scales: bool = False) -> Source:
    """Open a GGUF model: a file, any part of a split file, or a folder that holds one model.

    Args:
        path: the file or folder.
        exact_scales: repack Q4_K and Q5_K with float32 scales, so that no value changes. Products with such a matrix
            are computed in float32.

    Raises:
        UserError: a file is damaged or missing, the model is of another architecture, or its tokenizer is unknown.
    """
    model = _without_copied_head(read_gguf(path))
    source = str(model.files[0])
    args, notes = args_from_gguf(model.metadata, model.tensors, source)
    _check_tensors(model, args, source)
    tokenizer = read_tokenizer(model.metadata, args, source)
    if tokenizer.vocabulary is None:
        notes.append("the file holds no tokenizer: the new folder runs, but not on text")
    types = Counter(tensor.type for tensor in model.tensors.values())
    parts = f"{len(model.files)} parts, " if len(model.files) > 1 else ""
    return Source(
        path=path,
        kind=f"GGUF, {parts}{', '.join(f'{count} {name}' for name, count in types.most_common())}",
        args=args,
        tensors={name: _source_tensor(name, model, args, exact_scales) for name in expected_shapes(args)},
        generation_config=tokenizer.generation_config(),
        write_tokenizer=tokenizer.write,
        notes=[*notes, *_packing_notes(model, exact_scales)],
        files=model.files,
    )


def _without_copied_head(model: GGUFModel) -> GGUFModel:
    """Drop an `output.weight` that is a byte for byte copy of the embedding; the two are then tied."""
    embedding, head = (model.tensors.get(name) for name in ("token_embd.weight", "output.weight"))
    if embedding is None or head is None or (embedding.shape, embedding.type) != (head.shape, head.type):
        return model
    for start in range(0, head.n_rows, COMPARED_ROWS):
        stop = min(start + COMPARED_ROWS, head.n_rows)
        if not np.array_equal(embedding.read_rows(start, stop), head.read_rows(start, stop)):
            return model
    return replace(model, tensors={name: tensor for name, tensor in model.tensors.items() if tensor is not head})


def _check_tensors(model: GGUFModel, args: ModelArgs, source: str) -> None:
    expected = {hf_to_gguf(name): shape for name, shape in expected_shapes(args).items()}
    for name, shape in expected.items():
        if name not in model.tensors:
            raise GGUFError(f"{source}: tensor {name!r} is missing; the file is no complete Llama model")
        tensor = model.tensors[name]
        if tensor.shape != shape:
            raise GGUFError(f"{tensor.path}: tensor {name!r} has shape {tensor.shape}, the metadata mean {shape}")
        if len(shape) == 1 and tensor.type not in DENSE:
            raise GGUFError(f"{tensor.path}: tensor {name!r} is {tensor.type}, expected F32")
    for name in model.tensors.keys() - expected.keys() - {ROPE_FACTORS}:
        raise GGUFError(f"{model.tensors[name].path}: tensor {name!r} is not part of a Llama 3 model")


def _source_tensor(name: str, model: GGUFModel, args: ModelArgs, exact_scales: bool) -> SourceTensor:
    tensor = model.tensors[hf_to_gguf(name)]
    read = partial(_rows, tensor)
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        read = half_split(read, args.head_dim)
    rows = partial(_values, read, tensor.type)
    quantization, quantized_rows = None, None
    if tensor.type in AFFINE_BITS:
        quantization = Quantization(bits=AFFINE_BITS[tensor.type], group_size=AFFINE_GROUP)
        wide = exact_scales and tensor.type in WIDE_SCALES
        quantized_rows = partial(_packed, read, tensor, np.float32 if wide else np.float16)
    elif tensor.type not in DENSE:
        quantization, quantized_rows = REQUANTIZED, partial(_requantized, read, tensor)
    return SourceTensor(
        name=name,
        shape=tensor.shape,
        dtype=DENSE.get(tensor.type, mx.float32),
        origin=f"{tensor.path.name}: {tensor.name}",
        rows=rows,
        quantization=quantization,
        quantized_rows=quantized_rows,
    )


def _rows(tensor: GGUFTensor, start: int, stop: int) -> np.ndarray:
    """Rows as stored: uint8 (rows, row bytes). Each element of a vector is a row."""
    if len(tensor.shape) > 1:
        return tensor.read_rows(start, stop)
    return tensor.read_rows(0, 1).view(LAYOUTS[tensor.type].fields)[0, start:stop].view(np.uint8)


def _values(read: ReadRows, type_name: str, start: int, stop: int) -> mx.array:
    raw = read(start, stop)
    if type_name in DENSE:
        return to_mlx(raw.view(LAYOUTS[type_name].fields), DENSE[type_name])
    return mx.array(dequantize(raw, type_name))


def _packed(read: ReadRows, tensor: GGUFTensor, scale_dtype: type, start: int, stop: int) -> QuantizedRows:
    return _to_mlx_rows(to_affine(read(start, stop), tensor.type, scale_dtype), tensor, start)


def _requantized(read: ReadRows, tensor: GGUFTensor, start: int, stop: int) -> QuantizedRows:
    return _to_mlx_rows(requantize_8_bit(dequantize(read(start, stop), tensor.type)), tensor, start)


def _to_mlx_rows(affine: Affine, tensor: GGUFTensor, start: int) -> QuantizedRows:
    if not (np.isfinite(affine.scales).all() and np.isfinite(affine.biases).all()):
        raise GGUFError(
            f"{tensor.path}: tensor {tensor.name!r}: scales from row {start} on are no finite {affine.scales.dtype} "
            "numbers; the file is damaged, or needs --dequantize"
        )
    return QuantizedRows(*(mx.array(part) for part in affine))


def _packing_notes(model: GGUFModel, exact_scales: bool) -> list[str]:
    by_type: dict[str, list[GGUFTensor]] = {}
    for tensor in model.tensors.values():
        by_type.setdefault(tensor.type, []).append(tensor)
    notes = []
    for name, tensors in by_type.items():
        count = f"{len(tensors)} tensors of type {name}"
        if name in WIDE_SCALES and not exact_scales:
            samples = [rounding_error(tensor.read_rows(0, min(SAMPLE_ROWS, tensor.n_rows)), name) for tensor in tensors]
            worst = f"relative RMS error at most {max(samples):.1e} in the first {SAMPLE_ROWS} rows of each"
            notes.append(f"{count}: repacked with scales rounded to float16 ({worst}); see --exact-scales")
        elif name not in AFFINE_BITS and name not in DENSE:
            notes.append(f"{count}: quantized again to {REQUANTIZED.bits} bits, as MLX has no groups of 16 weights")
    return notes
