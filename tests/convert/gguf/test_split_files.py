"""Split GGUF files: any part opens the whole model, and parts that do not belong together are refused."""

import numpy as np
import pytest
from gguf_builder import encoded, gguf_bytes

from convert.gguf.reader import GGUFError
from convert.gguf.split_files import read_gguf

NAMES = ["model-00001-of-00003.gguf", "model-00002-of-00003.gguf", "model-00003-of-00003.gguf"]


def part(number: int, tensor: str, count: int = 3, **metadata) -> bytes:
    values = np.full((2, 32), number, np.float32)
    facts = {"split.no": number, "split.count": count, "split.tensors.count": 3, **metadata}
    return gguf_bytes(facts, [encoded(tensor, values)])


@pytest.fixture
def folder(tmp_path):
    for number, name in enumerate(NAMES):
        facts = {"general.architecture": "llama"} if number == 0 else {}
        (tmp_path / name).write_bytes(part(number, f"tensor {number}", **facts))
    return tmp_path


@pytest.mark.parametrize("given", [*NAMES, "."])
def test_any_part_or_the_folder_leads_to_all(folder, given):
    model = read_gguf(folder / given)
    assert [file.name for file in model.files] == NAMES
    assert model.metadata["general.architecture"] == "llama"
    for number in range(3):
        assert model.tensors[f"tensor {number}"].read_rows(0, 1).view("<f4")[0, 0] == number


def test_single_file_in_a_folder(tmp_path):
    path = tmp_path / "any name.gguf"
    path.write_bytes(gguf_bytes({}, [encoded("a", np.zeros((2, 32)))]))
    assert read_gguf(tmp_path).files == read_gguf(path).files == (path,)


def refused(path, message: str) -> None:
    with pytest.raises(GGUFError, match=message) as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value)


def test_missing_parts_are_named(folder):
    (folder / NAMES[0]).unlink()
    (folder / NAMES[2]).unlink()
    refused(folder / NAMES[1], f"missing {NAMES[0]}, {NAMES[2]}; download all 3 parts")


def test_folders_without_or_with_several_models(folder, tmp_path_factory):
    refused(tmp_path_factory.mktemp("empty"), "no .gguf file")
    (folder / "other.gguf").write_bytes(gguf_bytes({}))
    refused(folder, "several models .*model, other.gguf")


def test_parts_of_different_models(folder):
    (folder / NAMES[1]).write_bytes(part(1, "tensor 0"))
    refused(folder, f"'tensor 0' is in {NAMES[0]} too")
    (folder / NAMES[1]).write_bytes(part(1, "tensor 1", count=2))
    refused(folder, "split.count is 2, its name says 3")
    (folder / NAMES[1]).write_bytes(part(2, "tensor 1"))
    refused(folder, "split.no is 2, its name says part 2")
    (folder / NAMES[1]).write_bytes(gguf_bytes({"split.no": 1, "split.count": 3}))
    refused(folder, "split.tensors.count is 3, the parts hold 2 tensors")


def test_a_part_under_another_name(tmp_path):
    (tmp_path / "renamed.gguf").write_bytes(part(0, "a"))
    refused(tmp_path / "renamed.gguf", "split.count is 3, its name says 1")
    (tmp_path / "model-00004-of-00003.gguf").write_bytes(part(0, "a"))
    refused(tmp_path / "model-00004-of-00003.gguf", "part 4 of 3")


def test_a_damaged_part_is_named(folder):
    (folder / NAMES[2]).write_bytes(b"GGUF")
    refused(folder / NAMES[0], NAMES[2])


def test_what_lies_beside_a_model_is_left_aside(tmp_path):
    """Of a Mac's exFAT disk, and of repositories with an image encoder or an importance matrix."""
    (tmp_path / "M.GGUF").write_bytes(gguf_bytes({}, [encoded("a", np.zeros((2, 32)))]))
    for name in ("._M.GGUF", "mmproj-model-f16.gguf", "MMPROJ-x.GGUF", "imatrix.gguf"):
        (tmp_path / name).write_bytes(b"\0\5\26\7")
    assert read_gguf(tmp_path).files == (tmp_path / "M.GGUF",)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(GGUFError, match=r"several models \(M.GGUF, other.gguf\)"):
        read_gguf(tmp_path)


def test_parts_in_capitals(folder):
    for name in NAMES:
        (folder / name).rename(folder / name.replace(".gguf", ".GGUF"))
    assert len(read_gguf(folder).files) == len(read_gguf(folder / NAMES[1].replace(".gguf", ".GGUF")).files) == 3
