"""The streaming writer: whatever the order of the blocks, other readers read the same tensors."""

import json

import numpy as np
import pytest
from safetensors import safe_open

from convert.storage.safetensors_reader import read_safetensors
from convert.storage.safetensors_writer import Entry, SafetensorsWriter

import mlx.core as mx

ARRAYS = {
    "a": mx.random.normal((10, 6)).astype(mx.bfloat16),
    "b": mx.random.normal((7,)),
    "c": mx.random.randint(0, 1 << 30, (6, 4)).astype(mx.uint32),
    "d": mx.random.normal((3, 5)).astype(mx.float16),
    "e": mx.arange(8).astype(mx.uint8).reshape(2, 4),
}
ENTRIES = [Entry(name, array.dtype, array.shape) for name, array in ARRAYS.items()]


def write(folder, entries=ENTRIES, **options) -> SafetensorsWriter:
    """Every tensor in blocks of two rows, the last block first, tensors interleaved."""
    writer = SafetensorsWriter(folder, entries, **options)
    for start in range(8, -1, -2):
        for name, array in ARRAYS.items():
            if start < array.shape[0]:
                writer.write(name, start, array[start : start + 2])
    writer.finish()
    return writer


def same(left: mx.array, right: mx.array) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and mx.array_equal(left, right).item()


def test_one_file(tmp_path):
    writer = write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"] == writer.names
    loaded, metadata = mx.load(str(tmp_path / "model.safetensors"), return_metadata=True)
    assert metadata == {"format": "mlx"} and loaded.keys() == ARRAYS.keys()
    assert all(same(loaded[name], array) for name, array in ARRAYS.items())
    assert writer.nbytes == sum(array.nbytes for array in ARRAYS.values())
    tensors, _ = read_safetensors(tmp_path / "model.safetensors")
    assert min(tensor.offset for tensor in tensors.values()) % 64 == 0


def test_files_of_a_limited_size_and_their_index(tmp_path):
    writer = write(tmp_path, shard_bytes=150)
    first, second = writer.names
    assert (first, second) == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == writer.nbytes
    assert index["weight_map"] == {"a": first, "b": first, "c": second, "d": second, "e": second}
    for name, array in ARRAYS.items():
        path = tmp_path / index["weight_map"][name]
        assert same(mx.load(str(path))[name], array)
        if array.dtype != mx.bfloat16:  # numpy has none
            with safe_open(path, "numpy") as file:
                np.testing.assert_array_equal(file.get_tensor(name), np.asarray(array))


def test_tensor_larger_than_a_file_stands_alone(tmp_path):
    assert len(write(tmp_path, shard_bytes=1).names) == len(ENTRIES)


def test_incomplete_tensor_is_an_error(tmp_path):
    writer = SafetensorsWriter(tmp_path, ENTRIES)
    writer.write("a", 0, ARRAYS["a"][:9])
    with pytest.raises(ValueError, match="a was not written in full"):
        writer.finish()
    writer.close()


@pytest.mark.parametrize("rows", [mx.zeros((2, 6)), mx.zeros((2, 5), mx.bfloat16)], ids=["dtype", "shape"])
def test_rows_that_do_not_fit(tmp_path, rows):
    writer = SafetensorsWriter(tmp_path, ENTRIES)
    with pytest.raises(ValueError, match="a: rows of"):
        writer.write("a", 0, rows)
    assert list(tmp_path.iterdir()) == []
