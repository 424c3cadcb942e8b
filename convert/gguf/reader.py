"""Reads and checks the header of a GGUF file.

Format: ggml `docs/gguf.md`, versions 2 and 3, little endian. Every count and length is compared with the bytes left
before anything is allocated for it, so a damaged file ends in a one-line error and costs neither memory nor time.
Tensor data is read later, by `GGUFTensor.read_rows`.
"""

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from convert.gguf.types import LAYOUTS, TYPE_NAMES
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import check_weights_file

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
# The largest real headers (a big vocabulary and the text of its tokenizer.json) are below 40 MiB. The limit keeps a
# damaged length in a large file from claiming gigabytes.
MAX_HEADER = 64 << 20
MAX_NAME = 1024
MAX_NESTING = 4
MAX_DIMENSIONS = 4

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
# Fewest bytes of an entry. Metadata: name length, type, value. Tensor: name length, number of dimensions, one
# dimension, type, offset.
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


class GGUFError(UserError):
    """A GGUF file that cannot be read. The message names the file and the key or tensor."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a GGUF file: `shape` with rows first (GGUF has them last), `offset` in bytes from its start."""

    name: str
    shape: tuple[int, ...]
    type: str
    path: Path
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (all values of the last axis)."""
        layout = LAYOUTS[self.type]
        return self.shape[-1] // layout.values * layout.n_bytes

    @property
    def n_rows(self) -> int:
        """Number of rows; 1 for a vector."""
        return math.prod(self.shape[:-1])

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.n_rows * self.row_bytes

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` as stored: uint8, shape (stop - start, row_bytes).

        Raises:
            GGUFError: the file has become shorter since its header was read.
        """
        # Read without a memory map: mapped pages would count as this process's memory, and a mapped file that shrinks
        # kills the process.
        count = (stop - start) * self.row_bytes
        raw = np.fromfile(self.path, np.uint8, count, offset=self.offset + start * self.row_bytes)
        if raw.size != count:
            raise GGUFError(f"{self.path}: tensor {self.name!r}: the file ends inside it; download the file again")
        return raw.reshape(stop - start, self.row_bytes)


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata and tensor directory of one file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of one GGUF file.

    Metadata values are int, float, bool, str and (nested) lists of them.

    Raises:
        GGUFError: the file is missing, truncated, damaged or big endian; its version, a metadata type or a tensor type
            (not in `LAYOUTS`) is not supported; tensors overlap or reach beyond the file.
    """
    check_weights_file(path)
    try:
        with open(path, "rb") as file:
            if not file.read(1):
                raise GGUFError(f"{path}: the file is empty; download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise GGUFError(f"{path}: cannot be read: {error.strerror}") from error


def _parse(path: Path, data: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(path, data)
    n_tensors, n_metadata = _preamble(cursor)
    metadata = dict(_metadata(cursor, n_metadata))
    tensors = {tensor.name: tensor for tensor in _tensors(cursor, n_tensors)}
    alignment = _alignment(cursor, metadata)
    data_start = -(-cursor.position // alignment) * alignment
    located = {name: _locate(cursor, tensor, data_start, alignment) for name, tensor in tensors.items()}
    _refuse_overlaps(cursor, located)
    return GGUFHeader(path, metadata, located)


class _Cursor:
    """A read position in the header. `item` names what is being read there, for error messages."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0
        self.end = min(len(data), MAX_HEADER)
        self.item = "the header"

    def fail(self, problem: str) -> NoReturn:
        raise GGUFError(f"{self.path}: {self.item[:200]}: {problem}")

    def need(self, n_bytes: int) -> None:
        left = self.end - self.position
        if n_bytes > left:
            where = "left in the file" if self.end == len(self.data) else f"left in a header of {MAX_HEADER >> 20} MiB"
            self.fail(f"needs {n_bytes} bytes, {left} are {where}; the file is truncated or damaged, download it again")

    def scalar(self, code: struct.Struct) -> Any:
        self.need(code.size)
        (value,) = code.unpack_from(self.data, self.position)
        self.position += code.size
        return value

    def scalars(self, code: str, count: int) -> list:
        self.need(count * struct.calcsize("<" + code))
        values = struct.unpack_from(f"<{count}{code}", self.data, self.position)
        self.position += count * struct.calcsize("<" + code)
        return list(values)

    def strings(self, count: int) -> list[str]:
        # Called for hundreds of thousands of tokens and merges, hence local variables and one check per string.
        self.need(count * _U64.size)
        data, position, end, unpack = self.data, self.position, self.end, _U64.unpack_from
        values = []
        try:
            for _ in range(count):
                start = position + 8
                if start > end:
                    break
                position = start + unpack(data, position)[0]
                if position > end:
                    break
                values.append(data[start:position].decode())
        except UnicodeDecodeError:
            self.fail(f"string {len(values)} is not UTF-8; the file is damaged, download it again")
        if len(values) < count:
            self.fail(f"string {len(values)} of {count} reaches beyond the header; the file is truncated or damaged")
        self.position = position
        return values

    def name(self) -> str:
        self.need(_U64.size)
        (length,) = _U64.unpack_from(self.data, self.position)
        if not 0 < length <= MAX_NAME:
            self.fail(f"its name has {length} bytes, expected 1 to {MAX_NAME}; the file is damaged, download it again")
        return self.strings(1)[0]


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    cursor.need(len(MAGIC) + 4)
    if cursor.data[:4] != MAGIC:
        cursor.fail(f"begins with {cursor.data[:4]!r}, not with {MAGIC!r}: this is no GGUF file")
    cursor.position = 4
    version = cursor.scalar(_U32)
    if version not in (2, 3):
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
            cursor.fail(
                "the file is big endian; only little endian is read (gguf-convert-endian turns one into the other)"
            )
        cursor.fail(f"GGUF version {version}; versions 2 and 3 are read, make the file anew with a current llama.cpp")
    n_tensors, n_metadata = cursor.scalar(_U64), cursor.scalar(_U64)
    cursor.item = f"the directory of {n_metadata} metadata entries and {n_tensors} tensors"
    cursor.need(n_metadata * _MIN_METADATA_BYTES + n_tensors * _MIN_TENSOR_BYTES)
    return n_tensors, n_metadata


def _names(cursor: _Cursor, what: str, count: int) -> Iterator[str]:
    """Yield the names of `count` entries and refuse duplicates; the caller reads the rest of each entry."""
    seen = set()
    for index in range(count):
        cursor.item = f"{what} number {index}"
        name = cursor.name()
        cursor.item = f"{what} {name!r}"
        if name in seen:
            cursor.fail("appears twice; the file is damaged, download it again")
        seen.add(name)
        yield name


def _metadata(cursor: _Cursor, count: int) -> Iterator[tuple[str, Any]]:
    for key in _names(cursor, "metadata key", count):
        yield key, _value(cursor, cursor.scalar(_U32), MAX_NESTING)


def _value(cursor: _Cursor, type_number: int, nesting: int) -> Any:
    if type_number == ARRAY:
        return _array(cursor, nesting)
    return _array_of(cursor, type_number, 1, nesting)[0]


def _array(cursor: _Cursor, nesting: int) -> list:
    if nesting == 0:
        cursor.fail(f"arrays nested deeper than {MAX_NESTING}; the file is damaged, download it again")
    element, count = cursor.scalar(_U32), cursor.scalar(_U64)
    return _array_of(cursor, element, count, nesting - 1)


def _array_of(cursor: _Cursor, type_number: int, count: int, nesting: int) -> list:
    if type_number == STRING:
        return cursor.strings(count)
    if type_number == ARRAY:
        cursor.need(count * (_U32.size + _U64.size))
        return [_array(cursor, nesting) for _ in range(count)]
    if type_number not in SCALARS:
        cursor.fail(f"unknown value type {type_number}; the file is damaged or newer than this reader")
    return cursor.scalars(SCALARS[type_number], count)


def _tensors(cursor: _Cursor, count: int) -> Iterator[GGUFTensor]:
    """Yield the tensor directory in the file's order; `offset` still counts from the start of the data section."""
    for name in _names(cursor, "tensor", count):
        n_dimensions = cursor.scalar(_U32)
        if not 1 <= n_dimensions <= MAX_DIMENSIONS:
            cursor.fail(f"{n_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}; the file is damaged")
        shape = tuple(reversed(cursor.scalars("Q", n_dimensions)))
        type_name = _type_name(cursor, cursor.scalar(_U32), shape)
        yield GGUFTensor(name, shape, type_name, cursor.path, cursor.scalar(_U64))


def _type_name(cursor: _Cursor, number: int, shape: tuple[int, ...]) -> str:
    name = TYPE_NAMES.get(number)
    if name is None:
        cursor.fail(f"unknown tensor type {number}; the file is damaged or newer than this reader")
    if name not in LAYOUTS:
        cursor.fail(f"type {name} is not supported; take a file with one of {', '.join(LAYOUTS)}")
    if 0 in shape:
        cursor.fail(f"shape {shape} has no values; the file is damaged")
    if shape[-1] % LAYOUTS[name].values:
        cursor.fail(f"rows of {shape[-1]} values, but {name} holds them in blocks of {LAYOUTS[name].values}")
    return name


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    valid = isinstance(alignment, int) and 8 <= alignment <= MAX_HEADER and alignment & (alignment - 1) == 0
    if not valid:
        cursor.item = "metadata key 'general.alignment'"
        cursor.fail(f"is {alignment!r:.60}, expected a power of two from 8 on; the file is damaged")
    return alignment


def _locate(cursor: _Cursor, tensor: GGUFTensor, data_start: int, alignment: int) -> GGUFTensor:
    cursor.item = f"tensor {tensor.name!r}"
    if tensor.offset % alignment:
        cursor.fail(f"offset {tensor.offset} is not a multiple of the alignment {alignment}; the file is damaged")
    start = data_start + tensor.offset
    end, size = start + tensor.n_bytes, len(cursor.data)
    if end > size:
        cursor.fail(f"lies at bytes {start} to {end}, the file has {size}; it is truncated, download it again")
    return GGUFTensor(tensor.name, tensor.shape, tensor.type, tensor.path, start)


def _refuse_overlaps(cursor: _Cursor, tensors: dict[str, GGUFTensor]) -> None:
    previous = None
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if previous is not None and tensor.offset < previous.offset + previous.n_bytes:
            cursor.item = f"tensor {tensor.name!r}"
            cursor.fail(f"overlaps tensor {previous.name!r}; the file is damaged, download it again")
        previous = tensor
