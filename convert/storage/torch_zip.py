"""Reads torch's zip files (`.pth`, `pytorch_model*.bin`) without torch and without executing their pickle.

Such a file is an uncompressed zip: `<root>/data.pkl` describes the tensors, `<root>/data/<key>` holds the bytes of each
storage. (PyTorch `caffe2/serialize/inline_container.h` pads each entry so that its data is aligned.) Nothing is
extracted: tensors are read in place.
"""

import io
import math
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

from convert.storage.stored_tensor import DTYPES, Checksum, StoredTensor
from convert.storage.torch_pickle import MAX_PICKLE_BYTES, StatePickle, Storage, TensorView
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import check_weights_file

_MAX_DIRECTORY_BYTES = 8 << 20
_MAX_AXES = 8
_LOCAL_HEADER = struct.Struct("<26xHH")
_LEGACY_MAGIC = (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46", b"\x80")


class _BoundedFile(io.FileIO):
    """A file for `zipfile` that refuses reads of gigabytes and seeks outside of the file, as a damaged zip causes."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(
            _MAX_DIRECTORY_BYTES + 1 if size is None or size < 0 else min(size, _MAX_DIRECTORY_BYTES + 1)
        )
        if len(data) > _MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile("its directory is implausibly long")
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET and not 0 <= offset <= os.fstat(self.fileno()).st_size:
            raise zipfile.BadZipFile("its directory points outside of the file")
        return super().seek(offset, whence)


class _ZipEntry(NamedTuple):
    """An entry of the zip: offset of its data in the file, bytes of data, and their CRC-32."""

    name: str
    offset: int
    nbytes: int
    crc32: int


def read_pth(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a torch zip file by name; only the zip's directory and the pickle are read.

    Raises `UserError`, with file and tensor, if the file is not such a zip, is truncated, compressed, has entries that
    overlap or lie outside of it, or if its pickle holds anything but tensors (`torch_pickle.StatePickle`).
    """
    check_weights_file(path)
    entries = _read_directory(path)
    root = _find_root(path, entries)
    pickle = entries[f"{root}/data.pkl"]
    table = StatePickle(_read_entry(path, pickle), str(path)).load()
    tensors = {}
    for name, view in table.items():
        if isinstance(name, str) and isinstance(view, TensorView):
            tensors[name] = _locate(path, name, view, entries, root)
    if not tensors:
        raise UserError(f"{path}: holds no tensors at the top of its table; a state dictionary was expected")
    return tensors


def _read_directory(path: Path) -> dict[str, _ZipEntry]:
    """The zip's entries by name: all uncompressed, inside the file and without overlap."""
    try:
        with _BoundedFile(path) as file, zipfile.ZipFile(file) as archive:
            entries = [_locate_entry(path, file, info) for info in archive.infolist()]
            end_of_data = archive.start_dir
    # `zipfile` raises its own error, or these for an unknown version and for a name that is not text.
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {_why_not_a_zip(path)} ({error})") from error
    entries.sort(key=lambda entry: entry.offset)
    for entry, following in zip(entries, [*(e.offset for e in entries[1:]), end_of_data], strict=False):
        if entry.offset + entry.nbytes > following:
            raise UserError(f"{path}: entry {entry.name!r} overlaps what follows it; the file is damaged or malicious")
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) != len(entries):
        raise UserError(f"{path}: holds two entries of the same name; the file is damaged or malicious")
    return by_name


def _locate_entry(path: Path, file: io.FileIO, info: zipfile.ZipInfo) -> _ZipEntry:
    name = info.orig_filename
    if name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
        raise UserError(f"{path}: entry {name[:100]!r} would lie outside of the archive; refused as malicious")
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise UserError(f"{path}: entry {name[:100]!r} is compressed; torch never does that, refused as malicious")
    if info.flag_bits & 0x1:
        raise UserError(f"{path}: entry {name[:100]!r} is encrypted; torch never does that, refused")
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or not header.startswith(zipfile.stringFileHeader):
        raise UserError(f"{path}: entry {name[:100]!r} is not where the directory says; the file is damaged")
    name_length, extra_length = _LOCAL_HEADER.unpack(header)
    offset = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    return _ZipEntry(name, offset, info.file_size, info.CRC)


def _why_not_a_zip(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(8)
    if start.startswith(b"PK"):
        return "is truncated or damaged, fetch it again"
    if start.startswith(_LEGACY_MAGIC):
        return "is in torch's old format (before 1.6), which is a bare pickle; save it again with a recent torch"
    return "is not a torch file"


def _find_root(path: Path, entries: dict[str, _ZipEntry]) -> str:
    """The one folder inside the zip; torch names it after the file."""
    roots = [name.removesuffix("/data.pkl") for name in entries if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise UserError(f"{path}: is a zip, but not torch's: {len(roots)} entries named data.pkl, one expected")
    order = entries.get(f"{roots[0]}/byteorder")
    if order and order.nbytes <= 16 and _read_entry(path, order) != b"little":
        raise UserError(f"{path}: was written on a big-endian machine; save it again on a little-endian one")
    return roots[0]


def _read_entry(path: Path, entry: _ZipEntry) -> bytes:
    if entry.nbytes > MAX_PICKLE_BYTES:
        raise UserError(f"{path}: entry {entry.name!r} has {entry.nbytes} bytes; far fewer were expected, refused")
    with path.open("rb") as file:
        file.seek(entry.offset)
        data = file.read(entry.nbytes)
    if len(data) != entry.nbytes or zlib.crc32(data) != entry.crc32:
        raise UserError(
            f"{path}: entry {entry.name!r} does not match its checksum; the file is damaged, fetch it again"
        )
    return data


def _locate(path: Path, name: str, view: TensorView, entries: dict[str, _ZipEntry], root: str) -> StoredTensor:
    """Check a tensor's view against the size of its storage and locate it in the file."""
    storage: Storage = view.storage
    entry = entries.get(f"{root}/data/{storage.key}")
    if entry is None:
        raise UserError(f"{path}: tensor {name!r} needs storage {storage.key[:100]!r}, which the file does not hold")
    itemsize = DTYPES[storage.dtype][0].itemsize
    if storage.numel * itemsize != entry.nbytes:
        raise UserError(
            f"{path}: tensor {name!r} expects {storage.numel} elements of {storage.dtype} in storage {storage.key!r}, "
            f"which has {entry.nbytes} bytes; the file is damaged"
        )
    if len(view.shape) > _MAX_AXES:
        raise UserError(f"{path}: tensor {name!r} has {len(view.shape)} axes; at most {_MAX_AXES} are known")
    count = math.prod(view.shape)
    extent = sum((axis - 1) * stride for axis, stride in zip(view.shape, view.strides, strict=True)) + 1
    if count and (view.offset + extent > storage.numel or count > storage.numel):
        raise UserError(
            f"{path}: tensor {name!r} of shape {view.shape} and strides {view.strides} from element {view.offset} "
            f"reaches beyond its storage of {storage.numel} elements; the file is damaged or malicious"
        )
    checksum = Checksum(path, name, entry.offset, entry.nbytes, entry.crc32)
    offset = entry.offset + view.offset * itemsize
    return StoredTensor(path, name, storage.dtype, view.shape, offset, view.strides, checksum)
