"""A source that changes while it is converted is told, whatever changes of it, and nothing is written."""

import os

import pytest
from tiny_gguf import write_tiny
from tiny_models import ARGS, random_weights, write_folder

from convert.conversion import to_gguf as module
from convert.conversion.to_mlx import convert
from convert.storage.file_states import check_unchanged, file_states
from mlx_llama3.errors import UserError

CHANGES = {
    "rewritten": lambda file: os.utime(file, ns=(1, 1)),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b" "),
    "gone": lambda file: file.unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_source_that_changes_while_it_is_converted(tmp_path, name, change):
    folder = write_folder(tmp_path / "in", ARGS, random_weights(ARGS))
    calls = []

    def progress(written: int, total: int) -> None:
        calls.append(written)
        if written == total:
            change(folder / name)

    with pytest.raises(UserError, match=f"{name}: changed while it was read, so nothing was written"):
        convert(folder, tmp_path / "out", progress=False, on_progress=progress)
    assert calls and [path.name for path in tmp_path.iterdir()] == ["in"]


def test_to_gguf_too(tmp_path, monkeypatch):
    write_tiny(tmp_path / "in.gguf")
    write = module.write_gguf

    def interrupted(*arguments) -> None:
        write(*arguments)
        os.utime(tmp_path / "in.gguf", ns=(1, 1))

    monkeypatch.setattr(module, "write_gguf", interrupted)
    with pytest.raises(UserError, match="in.gguf: changed while it was read"):
        module.to_gguf(tmp_path / "in.gguf", tmp_path / "m.gguf", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


def test_what_is_read_only_is_unchanged(tmp_path):
    (tmp_path / "a").write_text("a")
    states = file_states([tmp_path / "a"])
    (tmp_path / "a").read_text()
    check_unchanged(states)
