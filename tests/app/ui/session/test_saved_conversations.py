"""Saved conversations on disk."""

import json
import os

import pytest

from app.ui.session import saved_conversations as saved
from mlx_llama3.errors import UserError

ID, OTHER = "0123456789abcdef", "fedcba9876543210"
TEXT = json.dumps(
    {
        "format": "mlx-llama3 conversation",
        "version": 1,
        "system": None,
        "messages": [{"role": "user", "content": "Hi\n there"}, {"role": "assistant", "content": "Hello."}],
        "settings": {},
    }
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_LLAMA3_DATA", str(tmp_path))
    return tmp_path / "conversations"


def test_what_is_written_is_found_again_the_last_first(folder):
    saved.write(ID, "First", TEXT)
    saved.write(OTHER, "Second", TEXT)
    os.utime(folder / f"{ID}.json", (1, 1))
    assert saved.titles() == [("Second", OTHER), ("First", ID)]
    title, text = saved.read(ID)
    assert title == "First" and json.loads(text)["messages"] == json.loads(TEXT)["messages"]
    assert sorted(path.name for path in folder.iterdir()) == [f"{ID}.json", f"{OTHER}.json"]


def test_a_file_of_the_terminal_chat_has_its_first_message_for_a_title(folder):
    folder.mkdir()
    (folder / f"{ID}.json").write_text(TEXT)
    assert saved.titles() == [("Hi there", ID)]


def test_rename_and_delete():
    saved.write(ID, "First", TEXT)
    assert saved.rename(ID, "  Another \n one ") == "Another one"
    assert saved.titles() == [("Another one", ID)]
    with pytest.raises(UserError, match="empty"):
        saved.rename(ID, "  ")
    assert saved.shortened("x" * 100) == "x" * 59 + "…"
    saved.delete(ID)
    saved.delete(ID)
    assert saved.titles() == [] and not saved.exists(ID)


@pytest.mark.parametrize("bad", ["../../etc/passwd", "x", "", "0123456789ABCDEF", ID + "/..", ID + "\n"])
def test_only_an_id_becomes_a_path(bad):
    assert not saved.exists(bad)
    for use in (saved.read, saved.delete, lambda name: saved.write(name, "t", TEXT)):
        with pytest.raises(UserError, match="no such conversation"):
            use(bad)


def test_files_of_another_kind_are_left_aside_and_told_of(folder):
    saved.write(ID, "First", TEXT)
    (folder / "notes.json").write_text("{}")
    (folder / f"{OTHER}.json").write_text("{")
    assert saved.titles() == [("First", ID)]
    with pytest.raises(UserError, match="not JSON"):
        saved.read(OTHER)
    (folder / f"{OTHER}.json").write_text("[1]")
    with pytest.raises(UserError, match="JSON object"):
        saved.read(OTHER)
    assert saved.titles() == [("First", ID)]


def test_the_folder_of_each_platform(monkeypatch, tmp_path):
    monkeypatch.delenv("MLX_LLAMA3_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "darwin")
    assert saved.data_dir() == tmp_path / "Library" / "Application Support" / "mlx-llama3"
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert saved.data_dir() == tmp_path / ".local" / "share" / "mlx-llama3"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert saved.data_dir() == tmp_path / "xdg" / "mlx-llama3"
