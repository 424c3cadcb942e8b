"""Fuses a LoRA adapter into a source: each block of rows is updated when it is read, before it is cast or quantized."""

import dataclasses
from functools import partial
from pathlib import Path

from convert.lora.adapter import Adapter, LoRAUpdate, read_adapter
from convert.lora.tied_head import EMBEDDING, HEAD, separate_head, with_vocabulary_of, without_copies
from convert.lora.tokenizer import with_tokenizer
from convert.sources.source import QuantizedRows, Source, SourceTensor
from convert.sources.tokenizer_files import tokenizer_files
from convert.storage.stored_tensor import to_mlx
from mlx_llama3.errors import UserError

import mlx.core as mx


def with_adapter(source: Source, folder: Path) -> Source:
    """Return the source with the adapter in `folder` (PEFT's or mlx-lm's) fused into its tensors.

    Updates are added in float32. Matrices that are quantized in the source are quantized again in the same format. A
    tied model gets a head of its own if the adapter changes embedding and head differently. The tokenizer and chat
    template in `folder` replace the source's.
    Raises `UserError` if the adapter is of a kind that cannot be fused, or updates modules or shapes that the model
    does not have.
    """
    adapter = read_adapter(folder)
    if not adapter.updates:
        raise UserError(f"{folder}: the adapter changes nothing; is it the right folder?")
    adapter = without_copies(adapter) if source.args.tie_word_embeddings else adapter
    model = with_vocabulary_of(adapter, separate_head(source, adapter), folder)
    tensors = dict(model.tensors)
    for module, update in adapter.updates.items():
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
        resized = model.args.vocab_size != source.args.vocab_size and module in (EMBEDDING, HEAD)
        tensors[name] = _fused(tensor, update, folder, base=None if resized else tensor)
    notes = [*source.notes, *_notes(source, model, adapter, folder)]
    files = [*source.files, folder / "adapter_config.json", adapter.file]
    files += [folder / name for name in tokenizer_files(folder)]
    kind = f"{source.kind}, with an adapter"
    return with_tokenizer(dataclasses.replace(model, kind=kind, tensors=tensors, notes=notes, files=files), folder)


def _notes(source: Source, model: Source, adapter: Adapter, folder: Path) -> list[str]:
    notes = [f"the adapter {folder.name} is fused into {len(adapter.updates)} tensors"]
    if model.args.tie_word_embeddings != source.args.tie_word_embeddings:
        notes.append("the head is stored by itself: the adapter changes it otherwise than the embedding it was tied to")
    if model.args.vocab_size != source.args.vocab_size:
        notes.append(f"the vocabulary is the adapter's: {model.args.vocab_size} instead of {source.args.vocab_size}")
    return notes


def _fused(tensor: SourceTensor, update: LoRAUpdate, folder: Path, base: SourceTensor | None) -> SourceTensor:
    rows = partial(_rows, tensor, update)
    packed = partial(_packed, tensor, rows) if tensor.quantized_rows else None
    origin = f"{tensor.origin} with {folder.name}"
    return dataclasses.replace(tensor, rows=rows, quantized_rows=packed, origin=origin, base=base)


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
