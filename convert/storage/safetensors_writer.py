"""Writes sharded safetensors from blocks of rows that arrive in any order.

All names, dtypes and shapes are known before the first byte is written. So each file begins with its final header, each
block is written to its final offset at once, and nothing is buffered in memory.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from convert.storage.stored_tensor import DTYPES

import mlx.core as mx

SHARD_BYTES = 5_000_000_000
_ALIGNMENT = 64
_NAMES = {dtype: name for name, (_, dtype) in DTYPES.items() if dtype is not None}


class Entry(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: mx.Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.size


class _Place(NamedTuple):
    shard: int
    offset: int


class SafetensorsWriter:
    """Writes `model.safetensors`, or `model-00001-of-0000N.safetensors` of up to `shard_bytes` each and an index.

    Tensors fill the shards in the order of `entries`; one larger than `shard_bytes` has a shard of its own. A shard is
    flushed to the disk when its last tensor is complete. Call `finish` after the last `write`, and `close` in any case.
    """

    def __init__(self, folder: Path, entries: Sequence[Entry], shard_bytes: int = SHARD_BYTES) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._missing = {entry.name: entry.nbytes for entry in entries}
        shards = _distribute(entries, shard_bytes)
        count = len(shards)
        self.names = (
            ["model.safetensors"]
            if count == 1
            else [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
        )
        self.nbytes = sum(entry.nbytes for entry in entries)
        self._folder = folder
        self._places: dict[str, _Place] = {}
        self._files: dict[int, int] = {}
        self._headers = [self._header(number, shard) for number, shard in enumerate(shards)]
        self._open_tensors = [len(shard) for shard in shards]

    def _header(self, number: int, shard: Sequence[Entry]) -> bytes:
        table: dict[str, object] = {"__metadata__": {"format": "mlx"}}
        begin = 0
        for entry in shard:
            end = begin + entry.nbytes
            table[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
            self._places[entry.name] = _Place(number, begin)
            begin = end
        text = json.dumps(table, separators=(",", ":")).encode()
        # The format allows spaces at the end of the header; they align the data.
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        for entry in shard:
            place = self._places[entry.name]
            self._places[entry.name] = place._replace(offset=8 + len(text) + place.offset)
        return len(text).to_bytes(8, "little") + text

    def write(self, name: str, start: int, rows: mx.array) -> None:
        """Write `rows`, (n, *shape[1:]) of the entry's dtype, as rows `start` to `start + n` of tensor `name`."""
        entry, place = self._entries[name], self._places[name]
        if rows.dtype != entry.dtype or rows.shape[1:] != entry.shape[1:]:
            raise ValueError(f"{name}: rows of {rows.dtype} {rows.shape} for {entry.dtype} {entry.shape}")
        bits = np.asarray(rows.view(mx.uint16) if rows.dtype == mx.bfloat16 else rows)
        row_bytes = entry.nbytes // entry.shape[0]
        _write_all(self._file(place.shard), memoryview(bits).cast("B"), place.offset + start * row_bytes)
        self._missing[name] -= bits.nbytes
        if not self._missing[name]:
            self._tensor_done(place.shard)

    def finish(self) -> None:
        """Write the index, if there are several shards. Raises `ValueError` if a tensor is incomplete."""
        incomplete = [name for name, missing in self._missing.items() if missing]
        if incomplete:
            raise ValueError(f"{incomplete[0]} was not written in full")
        if len(self.names) > 1:
            weight_map = {name: self.names[place.shard] for name, place in self._places.items()}
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
            path = self._folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def close(self) -> None:
        """Close the files that an error has left open."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _file(self, shard: int) -> int:
        if shard not in self._files:
            file = os.open(self._folder / self.names[shard], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            self._files[shard] = file
            _write_all(file, memoryview(self._headers[shard]), 0)
        return self._files[shard]

    def _tensor_done(self, shard: int) -> None:
        self._open_tensors[shard] -= 1
        if not self._open_tensors[shard]:
            file = self._files.pop(shard)
            os.fsync(file)
            os.close(file)


def _distribute(entries: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    return shards


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
