"""Torch's zip files are read in place; every defect ends in a one-line error that names it."""

import io
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from torch_zip import bf16_bits, contiguous, table, tensor, write_pth, write_zip

from convert.storage.torch_zip import read_pth
from mlx_llama3.errors import UserError

DATA = Path(__file__).parents[2] / "data"
RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((5, 7)).astype(np.float32)


def good(path: Path) -> Path:
    return write_pth(
        path,
        {
            "w": ("F32", MATRIX),
            "h": ("F16", MATRIX.astype(np.float16)),
            "b": ("BF16", bf16_bits(MATRIX)),
            "n": ("F32", MATRIX[0]),
        },
    )


def test_values_of_every_type(tmp_path):
    tensors = read_pth(good(tmp_path / "a.pth"))
    assert list(tensors) == ["w", "h", "b", "n"]
    assert [t.dtype for t in tensors.values()] == ["F32", "F16", "BF16", "F32"]
    np.testing.assert_array_equal(tensors["w"].rows(0, 5), MATRIX)
    np.testing.assert_array_equal(tensors["h"].rows(1, 4), MATRIX[1:4].astype(np.float16))
    np.testing.assert_array_equal(tensors["b"].rows(2, 3), bf16_bits(MATRIX)[2:3])
    np.testing.assert_array_equal(tensors["n"].rows(3, 7), MATRIX[0, 3:7])
    assert tensors["w"].rows(2, 2).shape == (0, 7)
    for stored in tensors.values():
        stored.checksum.verify()


def test_views_into_one_storage(tmp_path):
    """Two tensors may share a storage (tied weights), begin inside it, and have other strides than the usual."""
    storage = np.arange(40, dtype=np.float32)
    entries = {
        "whole": tensor("F32", "0", 40, (8, 5), (5, 1)),
        "again": tensor("F32", "0", 40, (8, 5), (5, 1)),
        "part": tensor("F32", "0", 40, (2, 5), (5, 1), offset=10),
        "turned": tensor("F32", "0", 40, (5, 8), (1, 5)),
        "every other": tensor("F32", "0", 40, (4, 5), (10, 1), offset=5),
        "empty": tensor("F32", "0", 40, (0, 5), (5, 1)),
    }
    tensors = read_pth(write_zip(tmp_path / "a.pth", table(entries), {"0": storage.tobytes()}))
    whole = storage.reshape(8, 5)
    np.testing.assert_array_equal(tensors["whole"].rows(0, 8), whole)
    np.testing.assert_array_equal(tensors["again"].rows(3, 5), whole[3:5])
    np.testing.assert_array_equal(tensors["part"].rows(0, 2), whole[2:4])
    np.testing.assert_array_equal(tensors["turned"].rows(1, 4), whole.T[1:4])
    np.testing.assert_array_equal(tensors["every other"].rows(0, 4), whole[1::2])
    assert tensors["empty"].rows(0, 0).shape == (0, 5)


def test_files_of_torch_itself():
    """The golden files were written by torch; the zip module reads the same bytes."""
    path = DATA / "llama31-2shards" / "consolidated.00.pth"
    tensors = read_pth(path)
    with zipfile.ZipFile(path) as archive:
        for key, stored in enumerate(tensors.values()):
            expected = np.frombuffer(archive.read(f"consolidated.00/data/{key}"), np.uint16)
            assert stored.dtype == "BF16" or stored.name == "rope.freqs"
            if stored.dtype == "BF16":
                np.testing.assert_array_equal(stored.rows(0, stored.shape[0]).ravel(), expected)
            stored.checksum.verify()
    assert tensors["tok_embeddings.weight"].shape == (256, 96)


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read_pth(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 500
    return message


def one(path: Path, **changes) -> Path:
    """A file with one tensor `w`, (2, 3) float32, with something changed."""
    view = {"kind": "F32", "key": "0", "numel": 6, "shape": (2, 3), "strides": (3, 1), "offset": 0, **changes}
    return write_zip(path, table({"w": tensor(**view)}), {"0": bytes(24)})


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"shape": (3, 3)}, "reaches beyond its storage of 6 elements"),
        ({"strides": (4, 1)}, "reaches beyond its storage"),
        ({"strides": (3, 2)}, "reaches beyond its storage"),
        ({"offset": 1}, "reaches beyond its storage"),
        ({"offset": 1 << 61}, "reaches beyond its storage"),
        ({"shape": (1 << 30, 1 << 30), "strides": (0, 0)}, "reaches beyond its storage"),
        ({"shape": (1,) * 9, "strides": (1,) * 9}, "9 axes"),
        ({"numel": 7}, "expects 7 elements of F32 in storage '0', which has 24 bytes"),
        ({"numel": -1}, "expects -1 elements"),
        ({"kind": "F16"}, "expects 6 elements of F16"),
        ({"key": "9"}, "needs storage '9'"),
        ({"key": "../data.pkl"}, "needs storage '../data.pkl'"),
        ({"key": "/etc/passwd"}, "needs storage '/etc/passwd'"),
    ],
)
def test_tensor_that_does_not_fit_its_storage(tmp_path, changes, named):
    message = refused(one(tmp_path / "a.pth", **changes))
    assert "tensor 'w'" in message and named in message


def test_compressed_entries_are_refused_unpacked(tmp_path):
    """A zip bomb: a gigabyte of zeros in a megabyte."""
    path = tmp_path / "bomb.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", table({"w": tensor("F32", "0", 1 << 20, (1 << 20,), (1,))}))
        archive.writestr("a/data/0", bytes(4 << 20))
    assert "is compressed" in refused(path)


@pytest.mark.parametrize("name", ["../evil/data.pkl", "/etc/data.pkl", "a\\..\\data.pkl", "a/../../data.pkl"])
def test_names_that_leave_the_archive(tmp_path, name):
    path = tmp_path / "slip.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"}.")
    assert "outside of the archive" in refused(path)


def test_two_entries_of_one_name(tmp_path):
    path = good(tmp_path / "a.pth")
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data/0", bytes(140))
    assert "two entries of the same name" in refused(path)


def entries_of(data: bytes) -> list[int]:
    """Offsets of the entries of the central directory."""
    at, positions = data.index(b"PK\x01\x02"), []
    while data[at : at + 4] == b"PK\x01\x02":
        positions.append(at)
        at += 46 + sum(struct.unpack_from("<HHH", data, at + 28))
    return positions


def patched(path: Path, at: int, form: str, *values: int) -> Path:
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, at, *values)
    path.write_bytes(data)
    return path


def test_overlapping_storages(tmp_path):
    """Two names share the same bytes, or an entry's length covers everything after it."""
    path = good(tmp_path / "a.pth")
    data = path.read_bytes()
    entries = entries_of(data)
    names = [data[at + 46 : at + 46 + struct.unpack_from("<H", data, at + 28)[0]] for at in entries]
    first, second = entries[names.index(b"archive/data/0")], entries[names.index(b"archive/data/3")]
    patched(path, second + 42, "<I", struct.unpack_from("<I", data, first + 42)[0])
    assert "overlaps" in refused(path)
    path.write_bytes(data)
    patched(path, first + 20, "<II", 1000, 1000)
    assert "overlaps" in refused(path)


def test_directory_that_points_elsewhere(tmp_path):
    path = good(tmp_path / "a.pth")
    entry = entries_of(path.read_bytes())[2]
    patched(path, entry + 42, "<I", 77)
    assert "is not where the directory says" in refused(path)
    patched(path, entry + 42, "<I", 0xFFFFFFF0)
    assert "its directory points outside of the file" in refused(path)
    patched(path, entry + 42, "<I", path.stat().st_size - 8)
    assert "is not where the directory says" in refused(path)


@pytest.mark.parametrize("offset", [1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_directory_that_points_beyond_any_file(tmp_path, offset):
    """A 64-bit offset of an entry that no system call accepts."""
    path, name = tmp_path / "a.pth", b"archive/data.pkl"
    extra = struct.pack("<HHQ", 1, 8, offset)
    entry = (
        struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *[0] * 9, len(name), len(extra), *[0] * 4, 0xFFFFFFFF) + name + extra
    )
    path.write_bytes(entry + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, len(entry), 0, 0))
    assert "its directory points outside of the file" in refused(path)


@pytest.mark.parametrize(
    ("at", "form", "value", "named"),
    [(6, "<H", 99, "zip file version 9.9"), (46, "<B", 0xFF, "codec can't decode")],
    ids=["a version of zip that is not known", "a name that is not UTF-8"],
)
def test_directory_that_the_zip_module_cannot_read(tmp_path, at, form, value, named):
    path = good(tmp_path / "a.pth")
    entry = entries_of(path.read_bytes())[0]
    patched(path, entry + 8, "<H", 0x800)  # names are in UTF-8
    message = refused(patched(path, entry + at, form, value))
    assert "is truncated or damaged" in message and named in message


def test_encrypted_entry(tmp_path):
    path = good(tmp_path / "a.pth")
    assert "encrypted" in refused(patched(path, entries_of(path.read_bytes())[0] + 8, "<H", 1))


def test_directory_as_long_as_the_file(tmp_path):
    """A claim of a huge directory must not make the reader load the file."""
    path = tmp_path / "a.pth"
    with path.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(0, io.SEEK_END)
        file.write(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 1, 1, 1 << 30, 0, 0))
    assert "implausibly long" in refused(path)


def test_truncated_anywhere(tmp_path):
    whole = good(tmp_path / "a.pth").read_bytes()
    path = tmp_path / "cut.pth"
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        assert "truncated" in refused(path) or length < 4


@pytest.mark.parametrize(
    "start, named",
    [
        (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", "old format (before 1.6)"),
        (b"\x80\x04}.", "old format"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a pointer of git-lfs"),
        (b"", "is not a torch file"),
    ],
)
def test_files_that_are_no_zip(tmp_path, start, named):
    path = tmp_path / "a.pth"
    path.write_bytes(start)
    assert named in refused(path)


def test_zip_of_something_else(tmp_path):
    path = tmp_path / "a.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", b"<xml/>")
    assert "0 entries named data.pkl" in refused(path)


def test_big_endian_machine(tmp_path):
    path = write_zip(tmp_path / "a.pth", table({"w": tensor("F32", "0", 1, (1,), (1,))}), {"0": bytes(4)})
    data = path.read_bytes().replace(b"little", b"big\0\0\0")
    path.write_bytes(data)
    assert "checksum" in refused(path)
    order = zipfile.ZipFile(path)
    with zipfile.ZipFile(tmp_path / "b.pth", "w") as archive:
        for name in order.namelist():
            if name != "archive/byteorder":
                archive.writestr(zipfile.ZipInfo(name), zipfile.ZipFile(path).read(name))
        archive.writestr(zipfile.ZipInfo("archive/byteorder"), b"big")
    assert "big-endian" in refused(tmp_path / "b.pth")


def test_no_tensors(tmp_path):
    assert "holds no tensors" in refused(write_zip(tmp_path / "a.pth", table({"step": b"K\x07"}), {}))


def test_pickle_longer_than_any_table(tmp_path):
    assert "far fewer" in refused(write_zip(tmp_path / "a.pth", b"N" * (5 << 20) + b".", {}))


def test_flipped_bit_in_the_table_or_in_a_tensor(tmp_path):
    path = good(tmp_path / "a.pth")
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        pickle_at = archive.getinfo("archive/data.pkl").header_offset + 60
    data = bytearray(whole)
    data[whole.index(b"tok" if b"tok" in whole else b"storage", pickle_at)] ^= 1
    path.write_bytes(data)
    assert "'archive/data.pkl' does not match its checksum" in refused(path)
    path.write_bytes(whole)
    stored = read_pth(path)["b"]
    data = bytearray(whole)
    data[stored.offset + 10] ^= 4
    path.write_bytes(data)
    with pytest.raises(UserError, match="the bytes of b do not match their checksum"):
        read_pth(path)["b"].checksum.verify()


def test_file_that_shrinks_while_it_is_read(tmp_path):
    path = good(tmp_path / "a.pth")
    tensors = read_pth(path)
    with path.open("r+b") as file:
        file.truncate(tensors["b"].offset + 4)
    with pytest.raises(UserError, match="became shorter while b was read"):
        tensors["b"].rows(0, 5)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_files_are_read_or_refused(tmp_path_factory, data):
    """Bytes are flipped, removed and repeated anywhere: the file is refused, or reads stay inside it."""
    folder = tmp_path_factory.mktemp("damaged", numbered=True)
    path = good(folder / "a.pth")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    start = data.draw(st.integers(0, len(content)))
    del content[start : start + data.draw(st.sampled_from([0, 0, 0, 1, 8, 64]))]
    path.write_bytes(content)
    try:
        for stored in read_pth(path).values():
            if stored.shape:
                assert stored.rows(0, stored.shape[0]).shape == stored.shape
    except UserError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
    shutil.rmtree(folder)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
@settings(max_examples=50, deadline=None)
def test_rows_equal_numpys_slices(tmp_path_factory, rows, columns, data):
    values = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    folder = tmp_path_factory.mktemp("rows", numbered=True)
    stored = read_pth(write_pth(folder / "a.pth", {"w": ("F32", values)}))["w"]
    assert stored.strides == contiguous(values.shape)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    np.testing.assert_array_equal(stored.rows(start, stop), values[start:stop])
    shutil.rmtree(folder)
