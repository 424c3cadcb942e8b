"""`--overwrite` replaces a model's files. The person's own files, and the source, are still there afterwards."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from tiny_models import ARGS, random_weights, write_folder

from convert.conversion.recipe import make_recipe
from convert.conversion.to_gguf import to_gguf
from convert.conversion.to_mlx import convert
from convert.storage.overwriting import carried_over, check_source_stays
from convert.storage.staged_folder import staged_folder
from mlx_llama3.errors import UserError

WEIGHTS = random_weights(ARGS)
OWN = ("notes.txt", "adapters/adapters.safetensors", "original/consolidated.00.pth", ".DS_Store", "model.gguf")
STALE = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "vocab.json", "chat_template.jinja")


def put(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")


def test_the_persons_files_are_kept_and_the_models_replaced(tmp_path):
    source, target = write_folder(tmp_path / "in", ARGS, WEIGHTS), tmp_path / "out"
    convert(source, target, progress=False)
    put(target, *OWN, *STALE, "additional_chat_templates/old.jinja", "additional_chat_templates/why.txt")
    (target / "link").symlink_to("/nowhere")
    report = convert(source, target, recipe=make_recipe("8"), overwrite=True, progress=False)
    for name in (*OWN, "additional_chat_templates/why.txt"):
        assert (target / name).read_text() == "mine", name
    assert os.readlink(target / "link") == "/nowhere"
    assert not any((target / name).exists() for name in (*STALE, "additional_chat_templates/old.jinja"))
    assert '"bits": 8' in (target / "config.json").read_text()
    kept = ".DS_Store, adapters, additional_chat_templates/why.txt, link, model.gguf, notes.txt, original"
    assert report.notes[-1] == f"kept in {target}: {kept}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_source_inside_of_the_target_is_kept(tmp_path):
    target = write_folder(tmp_path / "out", ARGS, WEIGHTS)
    source = shutil.copytree(target, tmp_path / "copy").rename(target / "before")
    whole = (source / "model.safetensors").read_bytes()
    convert(source, target, recipe=make_recipe("4"), overwrite=True, progress=False)
    assert (source / "model.safetensors").read_bytes() == whole
    assert (target / "model.safetensors").stat().st_size < len(whole)


@pytest.mark.parametrize("way", ["itself", "by a link", "files are links"])
def test_a_source_that_would_be_replaced(tmp_path, way):
    target = write_folder(tmp_path / "model", ARGS, WEIGHTS)
    source = target if way == "itself" else tmp_path / "other"
    if way == "by a link":
        source.symlink_to(target)
    if way == "files are links":
        source.mkdir()
        for path in target.iterdir():
            (source / path.name).symlink_to(path)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(UserError, match=r"model: its config\.json is part of the source and would be lost"):
        convert(source, target, recipe=make_recipe("4"), overwrite=True, progress=False)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_a_gguf_file_replaces_neither_its_source_nor_a_file_of_another_kind(tmp_path, demo_folder):
    file = tmp_path / "m.gguf"
    to_gguf(demo_folder, file, progress=False)
    before = file.read_bytes()
    with pytest.raises(UserError, match=r"m\.gguf: its m\.gguf is part of the source"):
        to_gguf(file, file, type_name="Q8_0", overwrite=True, progress=False)
    assert file.read_bytes() == before
    put(tmp_path, "notes.txt")
    with pytest.raises(UserError, match=r"notes\.txt: is no GGUF file, so it is not overwritten"):
        to_gguf(file, tmp_path / "notes.txt", overwrite=True, progress=False)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_only_files_of_the_top_are_the_models(tmp_path):
    put(tmp_path, "config.json", "deep/config.json", "additional_chat_templates/deep/a.jinja")
    assert carried_over(tmp_path) == ["additional_chat_templates/deep", "deep"]
    check_source_stays([tmp_path / "deep" / "config.json"], tmp_path)


def test_killed_while_carrying_over(tmp_path):
    """The next run finishes what the killed one began: nothing of the person's is lost in between."""
    target = tmp_path / "model"
    put(target, "config.json", "a.txt", "b.txt")
    program = f"""
import os, signal
from pathlib import Path
from convert.storage import staged_folder as staging, overwriting
first, moved = Path.rename, []
def rename(self, to):
    moved.append(self) if self.suffix == ".txt" else None
    return os.kill(os.getpid(), signal.SIGKILL) if len(moved) == 2 else first(self, to)
with staging.staged_folder(Path({str(target)!r}), overwrite=True) as folder:
    (folder / "config.json").write_text("new")
    Path.rename = rename
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert len([name for name in ("a.txt", "b.txt") if (target / name).exists()]) == 1
    with pytest.raises(UserError, match="stop"), staged_folder(target, overwrite=True):
        raise UserError("stop")
    assert carried_over(target) == ["a.txt", "b.txt"] and (target / "config.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
