"""Reader of safetensors files: the header, checked against the file, and tensors that are read where they lie.

The format (safetensors README, "Format"): 8 bytes of header length, little-endian; the header, a JSON object from name
to dtype, shape and [begin, end) offsets in the data that follows; the data, without gaps.
"""

import json
import math
from pathlib import Path
from typing import Any

from convert.storage.stored_tensor import DTYPES, StoredTensor, contiguous_strides
from mlx_llama3.errors import UserError

# The format's own limit is 100 MB; the longest known header (405B in one file) has a quarter of a megabyte.
_MAX_HEADER_BYTES = 16 << 20
_MAX_AXES = 8
_MAX_TENSORS = 100_000


def read_safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors by name, and the header's `__metadata__`; nothing but the header is read.

    UserError, naming file and tensor, if the header is truncated, is not such JSON, names a tensor twice, or describes
    tensors that overlap, leave gaps, lie outside of the file, or do not have the length of their dtype and shape.
    """
    header, data_start, size = _read_header(path)
    # MLX writes null where it has nothing to say.
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{path}: __metadata__ in its header is not a table of texts; the file is damaged")
    if len(header) > _MAX_TENSORS:
        raise UserError(f"{path}: its header names {len(header)} tensors; at most {_MAX_TENSORS} are read")
    tensors = {name: _locate(path, name, entry, data_start, size) for name, entry in header.items()}
    _check_layout(path, tensors, data_start, size)
    return tensors, metadata


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The parsed header, where the data begins, and the file's size, both in bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise UserError(
                f"{path}: has {size} bytes, too few for its header; it is truncated or not a safetensors file"
            )
        if length > _MAX_HEADER_BYTES:
            raise UserError(f"{path}: its header claims {length} bytes; at most {_MAX_HEADER_BYTES} are read")
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except _DuplicateKeyError as error:
        raise UserError(f"{path}: its header names {error.args[0][:100]!r} twice; the file is damaged") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: its header is not JSON; it is damaged or not a safetensors file") from error
    if not isinstance(header, dict):
        raise UserError(f"{path}: its header is not a table of tensors; the file is damaged")
    return header, 8 + length, size


class _DuplicateKeyError(Exception):
    """A key that stands twice in one JSON object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise _DuplicateKeyError(key)
        table[key] = value
    return table


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
    """Every byte of the data belongs to one tensor."""
    at = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, math.prod(tensor.shape))):
        if tensor.offset != at:
            word = "overlaps another" if tensor.offset < at else "follows a gap"
            raise UserError(f"{path}: tensor {tensor.name[:100]!r} {word} in the data; the file is damaged")
        at += math.prod(tensor.shape) * DTYPES[tensor.dtype][0].itemsize
    if at != size:
        raise UserError(f"{path}: {size - at} bytes follow the last tensor; the file is damaged")
