"""Fuses a LoRA adapter into a source: each block of rows is updated when it is read, before it is cast or quantized."""

import dataclasses
from functools import partial
from pathlib import Path

from convert.lora.adapter import LoRAUpdate, read_adapter
from convert.sources.source import QuantizedRows, Source, SourceTensor
from convert.storage.stored_tensor import to_mlx
from mlx_llama3.errors import UserError

import mlx.core as mx


def with_adapter(source: Source, folder: Path) -> Source:
    """Return the source with the adapter in `folder` (PEFT's or mlx-lm's) fused into its tensors.

    Updates are added in float32. Matrices that are quantized in the source are quantized again in the same format.
    Raises `UserError` if the adapter is of a kind that cannot be fused, or updates modules or shapes that the model
    does not have.
    """
    updates = read_adapter(folder)
    if not updates:
        raise UserError(f"{folder}: the adapter changes nothing; is it the right folder?")
    tensors = dict(source.tensors)
    for module, update in updates.items():
        name = f"{module}.weight"
        tensor = tensors.get(name)
        if tensor is None:
            tied = "; the head is tied to the embedding" if module == "lm_head" else ""
            raise UserError(f"{folder}: the adapter changes {name[:100]!r}, which the model does not have{tied}")
        if update.shape != tensor.shape:
            raise UserError(
                f"{folder}: the adapter's update of {name} is {update.shape}, the model has {tensor.shape}; "
                "it belongs to another model"
            )
        tensors[name] = _fused(tensor, update, folder)
    note = f"the adapter {folder.name} is fused into {len(updates)} tensors"
    return dataclasses.replace(
        source, kind=f"{source.kind}, with an adapter", tensors=tensors, notes=[*source.notes, note]
    )


def _fused(tensor: SourceTensor, update: LoRAUpdate, folder: Path) -> SourceTensor:
    rows = partial(_rows, tensor, update)
    packed = partial(_packed, tensor, rows) if tensor.quantized_rows else None
    origin = f"{tensor.origin} with {folder.name}"
    return dataclasses.replace(tensor, rows=rows, quantized_rows=packed, origin=origin, base=tensor)


def _rows(tensor: SourceTensor, update: LoRAUpdate, start: int, stop: int) -> mx.array:
    if update.whole is None:
        fused = tensor.rows(start, stop).astype(mx.float32)
    else:
        fused = to_mlx(update.whole.rows(start, stop), update.whole.mx_dtype).astype(mx.float32)
    if update.left is not None:
        # (n, rank) @ (rank, columns)
        fused += (update.scale * update.left(start, stop)) @ update.right()
    if update.magnitude is not None:
        norm = mx.linalg.norm(fused, axis=1)
        fused *= (update.magnitude(start, stop) / norm)[:, None]
    return fused


def _packed(tensor: SourceTensor, rows: partial[mx.array], start: int, stop: int) -> QuantizedRows:
    quantization = tensor.quantization
    dtype = tensor.quantized_rows(0, 1).scales.dtype if quantization.mode == "affine" else tensor.dtype
    dense = rows(start, stop).astype(dtype)
    return QuantizedRows(
        *mx.quantize(dense, group_size=quantization.group_size, bits=quantization.bits, mode=quantization.mode)
    )
