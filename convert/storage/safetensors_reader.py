"""Reads the header of safetensors files and checks it against the file; tensors are read later, in place.

The format (safetensors README, "Format"): 8 bytes of header length, little-endian; the header, a JSON object from name
to dtype, shape and [begin, end) offsets in the data section; the data section, without gaps.
"""

import math
from pathlib import Path
from typing import Any

from convert.storage.stored_tensor import DTYPES, StoredTensor, contiguous_strides
from mlx_llama3.errors import UserError
from mlx_llama3.system.safetensors_header import read_header

_MAX_AXES = 8
_MAX_TENSORS = 100_000


def read_safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Read the tensors by name, and the header's `__metadata__`; only the header is read.

    Raises `UserError`, with file and tensor, if the header is truncated, is not such JSON, names a tensor twice, or
    describes tensors that overlap, leave gaps, lie outside of the file, or do not have the length of their dtype and
    shape.
    """
    entries, metadata, data_start, size = read_header(path)
    if len(entries) > _MAX_TENSORS:
        raise UserError(f"{path}: its header names {len(entries)} tensors; at most {_MAX_TENSORS} are read")
    tensors = {name: _locate(path, name, entry, data_start, size) for name, entry in entries.items()}
    _check_layout(path, tensors, data_start, size)
    return tensors, metadata


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 62


def _locate(path: Path, name: str, entry: Any, data_start: int, size: int) -> StoredTensor:
    shown = repr(name[:100])
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
            pass
        case _:
            raise UserError(f"{path}: tensor {shown} lacks dtype, shape or data_offsets in the header; it is damaged")
    if dtype not in DTYPES:
        raise UserError(f"{path}: tensor {shown} has dtype {dtype[:20]!r}; known are {', '.join(DTYPES)}")
    if len(shape) > _MAX_AXES or not all(map(_is_size, (*shape, begin, end))) or begin > end:
        raise UserError(f"{path}: shape or data_offsets of tensor {shown} make no sense; the file is damaged")
    if end > size - data_start:
        raise UserError(f"{path}: tensor {shown} ends at byte {data_start + end}, the file at {size}; it is truncated")
    expected = math.prod(shape) * DTYPES[dtype][0].itemsize
    if end - begin != expected:
        raise UserError(
            f"{path}: tensor {shown} has {end - begin} bytes, but {expected} by its dtype {dtype} and shape {shape}; "
            "the file is damaged"
        )
    shape = tuple(shape)
    return StoredTensor(path, name, dtype, shape, data_start + begin, contiguous_strides(shape))


def _check_layout(path: Path, tensors: dict[str, StoredTensor], data_start: int, size: int) -> None:
    """Raise `UserError` unless every byte of the data section belongs to exactly one tensor."""
    at = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, math.prod(tensor.shape))):
        if tensor.offset != at:
            word = "overlaps another" if tensor.offset < at else "follows a gap"
            raise UserError(f"{path}: tensor {tensor.name[:100]!r} {word} in the data; the file is damaged")
        at += math.prod(tensor.shape) * DTYPES[tensor.dtype][0].itemsize
    if at != size:
        raise UserError(f"{path}: {size - at} bytes follow the last tensor; the file is damaged")
