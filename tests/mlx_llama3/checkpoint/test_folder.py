"""Folders from which no model is loaded: the sentence names a way out that leads somewhere."""

import json
import os

import pytest
from tiny_models import ARGS, random_weights, write_folder

from convert.sources.open import open_source
from mlx_llama3.checkpoint.folder import Checkpoint
from mlx_llama3.errors import UserError

WEIGHTS = random_weights(ARGS)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 9085657\n"
BOTH = pytest.mark.parametrize("read", [Checkpoint, open_source])


def said(read, folder) -> str:
    with pytest.raises(UserError) as error:
        read(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@BOTH
@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapters.safetensors"])
@pytest.mark.parametrize("config", [True, False])
def test_an_adapter_given_as_a_model(tmp_path, read, file, config):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (tmp_path / file).write_bytes(b"")
    if config:
        (tmp_path / "config.json").write_text((write_folder(tmp_path / "m", ARGS, {}) / "config.json").read_text())
    assert (
        f"it holds an adapter: fuse it into its model with `mlx-llama3 convert MODEL TARGET --adapter {tmp_path}`"
        in (said(read, tmp_path))
    )


@BOTH
def test_weights_of_another_name(tmp_path, read):
    folder = write_folder(tmp_path, ARGS, WEIGHTS)
    (folder / "model.safetensors").rename(folder / "ft-model-00001-of-00001.safetensors")
    text = said(read, folder)
    assert "ft-model-00001-of-00001.safetensors has another name" in text and "rename it to model.safetensors" in text
    assert "convert" not in text.replace(str(tmp_path), "")
    (folder / "ft-model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    assert read(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "m.GGUF"])
def test_what_convert_reads_is_sent_there(tmp_path, name):
    folder = write_folder(tmp_path, ARGS, WEIGHTS)
    (folder / "model.safetensors").rename(folder / name)
    assert f"convert it first: mlx-llama3 convert {folder} TARGET" in said(Checkpoint, folder)


@BOTH
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("link", "model.safetensors: is a link to a file that is gone; download the model again"),
        ("folder", "model.safetensors: is a folder; expected a file of weights"),
        ("FIFO", "model.safetensors: is no plain file; expected a file of weights"),
        ("pointer", "model.safetensors: is a pointer of git-lfs, not the file itself; run `git lfs pull`"),
    ],
)
def test_something_else_in_the_place_of_the_weights(tmp_path, read, kind, sentence):
    file = write_folder(tmp_path, ARGS, WEIGHTS) / "model.safetensors"
    file.unlink()
    {
        "link": lambda: file.symlink_to("../blobs/0123"),
        "folder": file.mkdir,
        "FIFO": lambda: os.mkfifo(file),
        "pointer": lambda: file.write_text(POINTER),
    }[kind]()
    assert sentence in said(read, tmp_path)
