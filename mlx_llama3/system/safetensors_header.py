"""Reads the header of a safetensors file, and checks it.

The format (safetensors README, "Format"): 8 bytes of header length, little-endian; the header, a JSON object from name
to dtype, shape and [begin, end) offsets in the data that follows; the data, without gaps.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from mlx_llama3.errors import UserError
from mlx_llama3.system.files import check_weights_file

# The format allows 100 MB; the longest known header (405B in one file) has a quarter of a megabyte.
_MAX_HEADER_BYTES = 16 << 20


class HeaderError(UserError):
    """The header of a file is damaged, or it is not a safetensors file."""


class SafetensorsHeader(NamedTuple):
    """The content of a header.

    entries: by tensor name, as in the file, not checked. metadata: the header's `__metadata__`, empty if there is none.
    data_start: offset of the data in bytes. size: of the file in bytes.
    """

    entries: dict[str, Any]
    metadata: dict[str, str]
    data_start: int
    size: int


def read_header(path: Path) -> SafetensorsHeader:
    """Read the header of a file, and nothing else.

    Raises:
        UserError: the file is absent or cannot be read.
        HeaderError: the header is truncated, longer than 16 MB, no JSON object, or names a tensor twice.
    """
    check_weights_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            _check_length(path, length, size)
            text = file.read(length)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    entries = _parse(path, text)
    # MLX writes null for no metadata.
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError(f"{path}: __metadata__ in its header is not a table of texts; the file is damaged")
    return SafetensorsHeader(entries, metadata, 8 + length, size)


def _check_length(path: Path, length: int, size: int) -> None:
    if size < 8 or length > size - 8:
        raise HeaderError(
            f"{path}: has {size} bytes, too few for its header; it is truncated or not a safetensors file"
        )
    if length > _MAX_HEADER_BYTES:
        raise HeaderError(f"{path}: its header claims {length} bytes; at most {_MAX_HEADER_BYTES} are read")


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except _DuplicateKeyError as error:
        raise HeaderError(f"{path}: its header names {error.args[0][:100]!r} twice; the file is damaged") from error
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"{path}: its header is not JSON; it is damaged or not a safetensors file") from error
    if not isinstance(header, dict):
        raise HeaderError(f"{path}: its header is not a table of tensors; the file is damaged")
    return header


class _DuplicateKeyError(Exception):
    """A key occurs twice in one JSON object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise _DuplicateKeyError(key)
        table[key] = value
    return table
