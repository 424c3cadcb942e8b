"""Files of the GGUF writer, read by our reader and by the gguf package."""

import io

import gguf
import numpy as np
import pytest

from convert.gguf.reader import read_header
from convert.gguf.writer import TensorOutput, file_size, write_gguf

METADATA = {
    "general.architecture": "llama",
    "text": "Ġé",
    "whole": 2**32 - 1,
    "real": 0.5,
    "yes": True,
    "words": ["a", "", "bü"],
    "numbers": [1, -2, 3],
    "reals": [0.5, -1.0],
}
VECTOR = np.arange(5, dtype=np.float32)
MATRIX = np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64)
PACKED = gguf.quants.quantize(MATRIX, gguf.GGMLQuantizationType.Q4_1)


def outputs() -> list[TensorOutput]:
    return [
        TensorOutput("vector", (5,), "F32", lambda: iter([VECTOR.view(np.uint8)])),
        TensorOutput("packed", (4, 64), "Q4_1", lambda: iter([PACKED[:1], PACKED[1:4]])),
        TensorOutput("matrix", (4, 64), "F32", lambda: iter([MATRIX.view(np.uint8)])),
    ]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.gguf"
    with open(path, "wb") as file:
        write_gguf(file, METADATA, outputs())
    return path


def test_our_reader(path):
    header = read_header(path)
    assert header.metadata == METADATA
    assert [(t.name, t.shape, t.type) for t in header.tensors.values()] == [
        ("vector", (5,), "F32"),
        ("packed", (4, 64), "Q4_1"),
        ("matrix", (4, 64), "F32"),
    ]
    np.testing.assert_array_equal(header.tensors["vector"].read_rows(0, 1).view("<f4")[0], VECTOR)
    np.testing.assert_array_equal(header.tensors["packed"].read_rows(0, 4), PACKED)
    np.testing.assert_array_equal(header.tensors["matrix"].read_rows(0, 4).view("<f4"), MATRIX)


def test_the_gguf_packages_reader(path):
    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert fields == METADATA
    assert [tensor.name for tensor in reader.tensors] == ["vector", "packed", "matrix"]
    np.testing.assert_array_equal(reader.tensors[1].data, PACKED)
    np.testing.assert_array_equal(reader.tensors[2].data, MATRIX)


def test_file_size(path):
    assert file_size(METADATA, outputs()) == path.stat().st_size


def test_too_few_rows_are_a_fault():
    short = TensorOutput("packed", (4, 64), "Q4_1", lambda: iter([PACKED[:3]]))
    with pytest.raises(ValueError, match="packed: 120 bytes came, its shape and type mean 160"):
        write_gguf(io.BytesIO(), {}, [short])
