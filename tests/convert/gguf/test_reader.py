"""The GGUF header reader: what it reads, and that every damaged file ends in a one-line error."""

import re
import struct
import sys

import gguf
import numpy as np
import pytest
from gguf_builder import Entry, Typed, encoded, gguf_bytes, string
from hypothesis import given, settings, strategies as st

from convert.gguf.reader import MAX_HEADER, MAX_NAME, GGUFError, read_header
from mlx_llama3.errors import UserError

F32 = 0
ROWS = np.arange(64, dtype=np.float32).reshape(2, 32)
TENSOR = encoded("a", ROWS)


@pytest.fixture
def write(tmp_path):
    def write(data: bytes):
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write


def entry(**changes) -> Entry:
    return Entry(**{"name": "a", "shape": (2, 32), "type": F32, "data": ROWS.tobytes(), **changes})


def test_reads_what_the_gguf_package_writes(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "u8": 255, "i8": -128, "u16": 65535, "i16": -3, "u32": 2**32 - 1, "i32": -(2**31), "f32": 0.5,
        "u64": 2**64 - 1, "i64": -(2**63), "f64": 0.1, "text": "Ġé\U0001f600", "no": False,
        "numbers": [1, -2, 3], "halves": [0.5, 1.5], "words": ["a", "", "ü"], "flags": [True, False],
    }  # fmt: skip
    kinds = {"u": "uint", "i": "int", "f": "float"}
    for key, value in values.items():
        scalar = (
            f"{kinds[key[0]]}{key[1:]}" if key[1:].isdigit() else {"text": "string", "no": "bool"}.get(key, "array")
        )
        getattr(writer, f"add_{scalar}")(key, value)
    vector, matrix = np.arange(40, dtype=np.float32), np.linspace(-1, 1, 5 * 64, dtype=np.float32).reshape(5, 64)
    packed = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("vector", vector)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("half", matrix.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header = read_header(path)
    assert header.metadata == {"general.architecture": "llama", **values}
    described = {name: (tensor.shape, tensor.type) for name, tensor in header.tensors.items()}
    assert described == {"vector": ((40,), "F32"), "packed": ((5, 64), "Q4_1"), "half": ((5, 64), "F16")}
    np.testing.assert_array_equal(header.tensors["vector"].read_rows(0, 1).view("<f4")[0], vector)
    np.testing.assert_array_equal(header.tensors["packed"].read_rows(1, 4), packed[1:4])
    np.testing.assert_array_equal(header.tensors["half"].read_rows(0, 5).view("<f2"), matrix.astype(np.float16))


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_versions_and_alignments(write, version, alignment):
    tensors = [TENSOR, encoded("b", ROWS + 1)]
    path = write(gguf_bytes({"general.alignment": alignment}, tensors, version=version, alignment=alignment))
    tensor = read_header(path).tensors["b"]
    assert tensor.offset % alignment == 0
    np.testing.assert_array_equal(tensor.read_rows(0, 2).view("<f4"), ROWS + 1)


def test_nested_and_empty_arrays(write):
    nested = Typed(9, (9, [(4, [1, 2]), (4, []), (8, ["x"])]))
    header = read_header(write(gguf_bytes({"nested": nested, "empty": Typed(9, (8, []))})))
    assert header.metadata == {"nested": [[1, 2], [], ["x"]], "empty": []}


def test_demo_header_is_read_without_a_call_for_each_string(demo_gguf):
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        header = read_header(demo_gguf)
    finally:
        sys.setprofile(None)
    assert 272 < len(calls) < 10_000
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(header.metadata["tokenizer.ggml.merges"]) == 48900
    assert len(header.tensors) == 272


def test_agrees_with_the_gguf_package_on_the_demo(demo_gguf):
    ours, theirs = read_header(demo_gguf), gguf.GGUFReader(demo_gguf)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.type, mine.offset, mine.n_bytes) == (
            tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)  # fmt: skip
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))


def broken_string(length: int) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + string("key") + struct.pack("<IQ", 8, length) + b"abc"


def broken_array(kind: int, count: int) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + string("key") + struct.pack("<IIQ", 9, kind, count) + b"abc"


def deep_array(depth: int) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + string("key") + struct.pack("<I", 9)
    return head + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 0)


GOOD = gguf_bytes({"key": "value"}, [TENSOR])
DAMAGED = {
    "empty": (b"", "empty"),
    "another format": (b"PK\x03\x04" + bytes(60), "no GGUF file"),
    "magic only": (b"GGUF", "truncated"),
    "version 1": (struct.pack("<4sIII", b"GGUF", 1, 0, 0), "version 1"),
    "version 4": (struct.pack("<4sIQQ", b"GGUF", 4, 0, 0), "version 4"),
    "big endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big endian"),
    "absurd tensor count": (struct.pack("<4sIQQ", b"GGUF", 3, 2**63, 0), "needs"),
    "absurd metadata count": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**60), "needs"),
    "absurd string": (broken_string(2**62), "'key'"),
    "string past the end": (broken_string(4), "'key'.*string 0 of 1"),
    "absurd array": (broken_array(0, 2**63), "'key'.*needs"),
    "absurd array of strings": (broken_array(8, 2**61), "'key'.*needs"),
    "absurd array of arrays": (broken_array(9, 2**60), "'key'.*needs"),
    "array past the end": (broken_array(4, 1), "'key'.*needs 4 bytes, 3 are left"),
    "unknown element type": (broken_array(13, 1), "'key'.*unknown value type 13"),
    "deep nesting": (deep_array(100), "'key'.*nested"),
    "no UTF-8": (broken_string(3).replace(b"abc", b"\xff\xfe\xfd"), "'key'.*UTF-8"),
    "unknown value type": (
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + string("key") + struct.pack("<II", 99, 0),
        "'key'.*unknown value type 99",
    ),
    "empty key": (gguf_bytes({"": 1}), "name has 0 bytes"),
    "endless key": (gguf_bytes({"k" * (MAX_NAME + 1): 1}), "name has 1025 bytes"),
    "duplicate key": (gguf_bytes({"kay": 1, "key": 2}).replace(b"kay", b"key"), "'key': appears twice"),
    "alignment 0": (gguf_bytes({"general.alignment": 0}), "general.alignment.*power of two"),
    "alignment 33": (gguf_bytes({"general.alignment": 33}), "general.alignment.*power of two"),
    "alignment of words": (gguf_bytes({"general.alignment": "wide"}), "general.alignment.*power of two"),
    "truncated data": (gguf_bytes({}, [TENSOR])[:-1], "'a': lies at bytes .* truncated"),
    "offset out of range": (gguf_bytes({}, [entry(offset=2**40)]), "'a': lies at"),
    "absurd offset": (gguf_bytes({}, [entry(offset=2**64 - 32)]), "'a': lies at"),
    "crooked offset": (gguf_bytes({}, [entry(offset=4)]), "'a': offset 4"),
    "overlap": (gguf_bytes({}, [TENSOR, entry(name="b", offset=128)]), "'b': overlaps tensor 'a'"),
    "same place": (gguf_bytes({}, [TENSOR, entry(name="b", offset=0)]), "overlaps"),
    "duplicate tensor": (gguf_bytes({}, [TENSOR, entry()]), "'a': appears twice"),
    "no dimensions": (gguf_bytes({}, [entry(shape=())]), "'a': 0 dimensions|needs"),
    "many dimensions": (gguf_bytes({}, [entry(shape=(1, 1, 1, 2, 32))]), "'a': 5 dimensions"),
    "absurd shape": (gguf_bytes({}, [entry(shape=(2**63, 2**63))]), "'a': lies at"),
    "empty shape": (gguf_bytes({}, [entry(shape=(0, 32))]), "'a': shape .* no values"),
    "unknown tensor type": (gguf_bytes({}, [entry(type=77)]), "'a': unknown tensor type 77"),
    "unsupported tensor type": (gguf_bytes({}, [entry(type=16)]), "'a': type IQ2_XXS is not supported"),
    "part of a block": (gguf_bytes({}, [entry(shape=(4, 16), type=3)]), "'a': rows of 16 values, .* blocks of 32"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damage_is_named(write, data, message):
    path = write(data)
    with pytest.raises(GGUFError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(UserError, match=re.escape(str(path))):
            read_header(path)


def test_every_truncation_is_refused(write):
    for length in range(len(GOOD)):
        with pytest.raises(GGUFError):
            read_header(write(GOOD[:length]))


def test_a_large_file_does_not_lend_its_size_to_a_damaged_length(tmp_path):
    path = tmp_path / "model.gguf"
    with open(path, "wb") as file:
        file.write(broken_array(0, MAX_HEADER + 1))
        file.truncate(8 << 30)  # sparse
    with pytest.raises(GGUFError, match="'key': needs .* left in a header of 64 MiB"):
        read_header(path)


def test_a_file_that_shrinks_after_opening_is_named(write):
    path = write(GOOD)
    tensor = read_header(path).tensors["a"]
    path.write_bytes(GOOD[:-8])
    with pytest.raises(GGUFError, match="'a': the file ends inside it"):
        tensor.read_rows(0, 2)


SCALAR_VALUES = st.one_of(st.booleans(), st.integers(0, 2**32 - 1), st.floats(width=32, allow_nan=False), st.text())
VALUES = SCALAR_VALUES | st.lists(st.text(), min_size=1) | st.lists(st.integers(0, 2**32 - 1), min_size=1)


@given(
    st.dictionaries(st.text(min_size=1, max_size=40), VALUES, max_size=8).filter(lambda d: "general.alignment" not in d)
)
@settings(max_examples=100, deadline=None)
def test_metadata_round_trip(tmp_path_factory, metadata):
    path = tmp_path_factory.getbasetemp() / "round-trip.gguf"
    path.write_bytes(gguf_bytes(metadata, [TENSOR]))
    assert read_header(path).metadata == metadata


SEED = gguf_bytes(
    {"general.alignment": 32, "words": ["one", "two"], "numbers": [1, 2, 3], "nested": Typed(9, (9, [(4, [1])]))},
    [TENSOR, encoded("b", ROWS, "Q8_0"), encoded("c", ROWS[0])],
)
MUTATION = st.tuples(
    st.sampled_from(["set", "insert", "delete", "u32", "u64", "cut"]), st.integers(0, len(SEED) - 1),
    st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]),
)  # fmt: skip


def mutated(data: bytes, kind: str, at: int, number: int) -> bytes:
    at = min(at, len(data))
    if kind == "set":
        return data[:at] + bytes([number & 255]) + data[at + 1 :]
    if kind == "insert":
        return data[:at] + number.to_bytes(8, "little")[: 1 + number % 8] + data[at:]
    if kind == "delete":
        return data[:at] + data[at + 1 + number % 16 :]
    if kind == "cut":
        return data[:at]
    width = 4 if kind == "u32" else 8
    return data[:at] + (number % 2 ** (8 * width)).to_bytes(width, "little") + data[at + width :]


@given(st.lists(MUTATION, min_size=1, max_size=4))
@settings(max_examples=1500, deadline=500)
def test_mutated_headers_are_read_or_refused(tmp_path_factory, mutations):
    data = SEED
    for mutation in mutations:
        data = mutated(data, *mutation)
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(data)
    try:
        header = read_header(path)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        for tensor in header.tensors.values():
            assert tensor.read_rows(0, tensor.n_rows).size == tensor.n_bytes
