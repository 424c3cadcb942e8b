"""The header of a safetensors file: as MLX writes it, and what is refused in one sentence."""

import json
import struct

import pytest

from mlx_llama3.errors import UserError
from mlx_llama3.system.safetensors_header import HeaderError, read_header

import mlx.core as mx


def test_a_header_as_mlx_writes_it(tmp_path):
    path = tmp_path / "a.safetensors"
    mx.save_safetensors(str(path), {"x": mx.zeros((2, 3)), "y": mx.ones((4,), mx.uint8)}, {"format": "test"})
    header = read_header(path)
    assert header.metadata == {"format": "test"}
    assert header.entries["x"]["shape"] == [2, 3] and header.entries["x"]["dtype"] == "F32"
    assert header.size == path.stat().st_size == header.data_start + 2 * 3 * 4 + 4
    first, last = header.entries["y"]["data_offsets"]
    assert path.read_bytes()[header.data_start + first : header.data_start + last] == b"\1\1\1\1"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "too few for its header"),
        (struct.pack("<Q", 100) + b"{}", "too few for its header"),
        (struct.pack("<Q", 17 << 20) + bytes(18 << 20), "at most 16777216 are read"),
        (struct.pack("<Q", 2) + b"{]", "is not JSON"),
        (struct.pack("<Q", 2) + b"[]", "is not a table of tensors"),
        (struct.pack("<Q", 15) + b'{"a": 1,"a": 2}', "names 'a' twice"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "is not JSON"),
        (struct.pack("<Q", 21) + json.dumps({"__metadata__": [1]}).encode(), "__metadata__ .* is not a table of texts"),
    ],
)
def test_a_damaged_header_is_named(tmp_path, content, named):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(HeaderError, match=named) as error:
        read_header(path)
    assert str(error.value).startswith(f"{path}: ")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match="absent: no such file"):
        read_header(tmp_path / "absent")
    with pytest.raises(UserError, match="is a folder; expected a file of weights"):
        read_header(tmp_path)
