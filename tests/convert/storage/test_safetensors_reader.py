"""The safetensors header, checked against the file; good files agree with the safetensors package."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import save_file

from convert.storage.safetensors_reader import read_safetensors
from mlx_llama3.errors import UserError

import mlx.core as mx


def raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file with the given header: any object, or any text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape=(2, 3), dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_files_of_the_safetensors_package(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal((4, 6)).astype(np.float32),
        "b": rng.standard_normal((3, 2, 5)).astype(np.float16),
        "c": np.arange(7, dtype=np.int64),
        "d": np.empty((0, 4), np.float32),
    }
    save_file(arrays, tmp_path / "a.safetensors", {"format": "pt"})
    tensors, metadata = read_safetensors(tmp_path / "a.safetensors")
    assert metadata == {"format": "pt"} and tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape
        np.testing.assert_array_equal(tensors[name].rows(0, array.shape[0]), array)
    np.testing.assert_array_equal(tensors["b"].rows(1, 2), arrays["b"][1:2])


def test_bfloat16_of_mlx(tmp_path):
    values = mx.random.normal((5, 4)).astype(mx.bfloat16)
    mx.save_safetensors(str(tmp_path / "a.safetensors"), {"w": values})
    tensor = read_safetensors(tmp_path / "a.safetensors")[0]["w"]
    assert tensor.dtype == "BF16"
    np.testing.assert_array_equal(tensor.rows(1, 4), np.asarray(values.view(mx.uint16))[1:4])


BAD = {
    "header longer than the file": (b"{}", b"", 99, "too few for its header"),
    "header of 16 exabytes": (b"{}", b"", (1 << 64) - 1, "too few for its header"),
    "not JSON": (b"{]", b"", None, "is not JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", None, "is not JSON"),
    "nested without end": (b"[" * 100_000, b"", None, "is not JSON"),
    "a number of a million digits": (b'{"a": ' + b"9" * 1_000_000 + b"}", b"", None, "is not JSON"),
    "a list": ([], b"", None, "not a table of tensors"),
    "a name twice": (b'{"w": {"dtype": "U8", "dtype": "I8"}}', b"", None, "names 'dtype' twice"),
    "a tensor twice": (b'{"w": 1, "w": 2}', b"", None, "names 'w' twice"),
    "a number as a tensor": ({"w": 1}, b"", None, "lacks dtype"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [1]}}, b"", None, "lacks dtype"),
    "three offsets": ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, b"", None, "lacks dtype"),
    "text as shape": ({"w": {"dtype": "F32", "shape": "11", "data_offsets": [0, 4]}}, b"", None, "lacks dtype"),
    "unknown dtype": ({"w": entry(0, 24, dtype="F4")}, bytes(24), None, "has dtype 'F4'; known are F32"),
    "negative axis": ({"w": entry(0, 24, (-2, -3))}, bytes(24), None, "make no sense"),
    "fraction as axis": ({"w": entry(0, 24, (2.0, 3))}, bytes(24), None, "make no sense"),
    "true as axis": ({"w": entry(0, 12, (True, 3))}, bytes(12), None, "make no sense"),
    "huge axis": ({"w": entry(0, 24, (1 << 63, 3))}, bytes(24), None, "make no sense"),
    "too many axes": ({"w": entry(0, 4, (1,) * 9)}, bytes(4), None, "make no sense"),
    "offsets reversed": ({"w": entry(24, 0)}, bytes(24), None, "make no sense"),
    "negative offset": ({"w": entry(-24, 0)}, bytes(24), None, "make no sense"),
    "beyond the file": ({"w": entry(0, 24)}, bytes(23), None, "it is truncated"),
    "too short for its shape": ({"w": entry(0, 20)}, bytes(20), None, "has 20 bytes, but 24 by its dtype F32"),
    "too long for its shape": ({"w": entry(0, 28)}, bytes(28), None, "has 28 bytes, but 24"),
    "product beyond 64 bits": ({"w": entry(0, 24, (1 << 40, 1 << 40))}, bytes(24), None, "has 24 bytes, but"),
    "overlap": ({"v": entry(0, 24), "w": entry(20, 44)}, bytes(44), None, "'w' overlaps another"),
    "the same bytes": ({"v": entry(0, 24), "w": entry(0, 24)}, bytes(24), None, "overlaps another"),
    "gap": ({"v": entry(0, 24), "w": entry(28, 52)}, bytes(52), None, "'w' follows a gap"),
    "gap at the start": ({"w": entry(4, 28)}, bytes(28), None, "'w' follows a gap"),
    "bytes at the end": ({"w": entry(0, 24)}, bytes(30), None, "6 bytes follow the last tensor"),
    "metadata that is no table": ({"__metadata__": ["x"]}, b"", None, "__metadata__"),
    "metadata with numbers": ({"__metadata__": {"a": 1}}, b"", None, "__metadata__"),
}


@pytest.mark.parametrize("header, data, length, named", BAD.values(), ids=BAD)
def test_bad_header(tmp_path, header, data, length, named):
    path = raw(tmp_path / "a.safetensors", header, data, length)
    with pytest.raises(UserError) as error:
        read_safetensors(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and named in message and "\n" not in message and len(message) < 400


def test_header_longer_than_is_read(tmp_path):
    path = raw(tmp_path / "a.safetensors", b"{}", length=32 << 20)
    with path.open("r+b") as file:
        file.truncate(64 << 20)
    with pytest.raises(UserError, match="its header claims 33554432 bytes"):
        read_safetensors(path)


@pytest.mark.parametrize("length", [0, 3, 7, 8])
def test_shorter_than_any_header(tmp_path, length):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\x02" + bytes(length)[1:] if length else b"")
    with pytest.raises(UserError, match="too few for its header"):
        read_safetensors(path)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_files_are_read_or_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged", numbered=True)
    path = raw(folder / "a.safetensors", {"v": entry(0, 24), "w": entry(24, 32, (4,), "F16")}, bytes(32))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    path.write_bytes(content)
    try:
        for tensor in read_safetensors(path)[0].values():
            if tensor.shape:
                assert tensor.rows(0, tensor.shape[0]).shape == tensor.shape
    except UserError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
    shutil.rmtree(folder)
