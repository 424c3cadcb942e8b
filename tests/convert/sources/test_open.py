"""The kind of a checkpoint is recognised by what is there, whatever its name."""

import errno
from pathlib import Path

import pytest
from tiny_gguf import write_tiny
from tiny_models import ARGS, random_weights, write_folder

from convert.sources.open import open_source
from mlx_llama3.errors import UserError


@pytest.mark.parametrize("name", ["sha256-" + "ab" * 32, "MODEL.GGUF", "no-suffix"])
def test_a_gguf_by_another_name(tmp_path, name):
    write_tiny(tmp_path / "m.gguf")
    expected = open_source(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").rename(tmp_path / name)
    source = open_source(tmp_path / name)
    assert source.kind == expected.kind and source.tensors.keys() == expected.tensors.keys()
    assert source.name == ("MODEL" if name == "MODEL.GGUF" else name)


def test_a_file_of_another_kind_and_an_empty_one(tmp_path):
    for content in (b"", b"GG", b"{}"):
        (tmp_path / "blob").write_bytes(content)
        with pytest.raises(UserError, match="give the folder that holds it, or a .gguf file"):
            open_source(tmp_path / "blob")


def test_files_of_a_macs_exfat_disk_are_no_part_of_a_model(tmp_path):
    folder = write_folder(tmp_path, ARGS, random_weights(ARGS))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    for name in [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]:
        (folder / name.parent / f"._{name.name}").write_bytes(b"\0\5\26\7")
    source = open_source(folder)
    assert [file.name for file in source.files] == [
        "config.json", "model.safetensors", "tokenizer.json", "tool_use.jinja",
    ]  # fmt: skip
    assert not any("._" in note for note in source.notes)


def test_errors_of_the_file_system_are_one_sentence(tmp_path, monkeypatch):
    """A closed folder, to a person who is not root."""
    folder = write_folder(tmp_path / "m", ARGS, random_weights(ARGS))
    first = Path.iterdir

    def closed(path: Path):
        if path == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return first(path)

    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(UserError, match="m: Permission denied; check the file and its folder"):
        open_source(folder)
    with pytest.raises(UserError, match="File name too long"):
        open_source(tmp_path / ("a" * 300))
