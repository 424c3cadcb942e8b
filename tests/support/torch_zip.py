"""Writes torch's zip files byte by byte, without torch: valid ones, and deliberately broken ones."""

import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

CLASSES = {"F32": "FloatStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage", "I8": "CharStorage"}
ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1}


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> the upper half of its bits (truncated, not rounded: enough for a test)."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def text(value: str) -> bytes:
    """BINUNICODE."""
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def number(value: int) -> bytes:
    """BININT, or LONG1 beyond 32 bits."""
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    packed = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(packed)]) + packed


def group(items: Iterable[int]) -> bytes:
    """A tuple of numbers."""
    return b"(" + b"".join(map(number, items)) + b"t"


def storage(kind: str, key: str, numel: int) -> bytes:
    """The persistent id of a storage."""
    return (
        b"(("
        + text("storage")
        + f"ctorch\n{CLASSES[kind]}\n".encode()
        + text(key)
        + text("cpu")
        + number(numel)
        + b"tQ"
    )


def tensor(kind: str, key: str, numel: int, shape, strides, offset: int = 0) -> bytes:
    """A call of `_rebuild_tensor_v2`."""
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n"
        + storage(kind, key, numel)
        + number(offset)
        + group(shape)
        + group(strides)
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def table(entries: Mapping[str, bytes]) -> bytes:
    """A complete pickle: a dictionary from name to the object that its instructions create."""
    return b"\x80\x02}(" + b"".join(text(name) + value for name, value in entries.items()) + b"u."


def contiguous(shape) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    return tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))


def write_zip(path: Path, pickle: bytes, storages: Mapping[str, bytes], root: str = "archive", **more: bytes) -> Path:
    """Write a zip in torch's layout: uncompressed, data aligned to 64 bytes by the header's extra field."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        entries = {
            "data.pkl": pickle,
            "byteorder": b"little",
            **{f"data/{key}": data for key, data in storages.items()},
        }
        for name, data in {**entries, "version": b"3\n", **more}.items():
            info = zipfile.ZipInfo(f"{root}/{name}")
            header = archive.fp.tell() + 30 + len(info.filename) + 4
            info.extra = b"FB" + struct.pack("<H", -header % 64) + b"Z" * (-header % 64)
            archive.writestr(info, data)
    return path


def write_pth(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]], **more: bytes) -> Path:
    """Write a state dictionary: name -> (dtype, bits); the bits of BF16 are uint16."""
    entries, storages = {}, {}
    for key, (name, (kind, bits)) in enumerate(tensors.items()):
        entries[name] = tensor(kind, str(key), bits.size, bits.shape, contiguous(bits.shape))
        storages[str(key)] = bits.tobytes()
    return write_zip(path, table(entries), storages, **more)
