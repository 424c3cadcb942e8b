"""Saved conversations on disk."""

import json
import os

import pytest

from app.ui.session import saved_conversations
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


def test_written_conversations_are_listed_newest_first(folder):
    saved_conversations.write(ID, "First", TEXT)
    saved_conversations.write(OTHER, "Second", TEXT)
    os.utime(folder / f"{ID}.json", (1, 1))
    assert saved_conversations.titles() == [("Second", OTHER), ("First", ID)]
    title, text = saved_conversations.read(ID)
    assert title == "First" and json.loads(text)["messages"] == json.loads(TEXT)["messages"]
    assert sorted(path.name for path in folder.iterdir()) == [f"{ID}.json", f"{OTHER}.json"]


def test_a_file_of_the_terminal_chat_has_its_first_message_for_a_title(folder):
    folder.mkdir()
    (folder / f"{ID}.json").write_text(TEXT)
    assert saved_conversations.titles() == [("Hi there", ID)]


def test_rename_and_delete():
    saved_conversations.write(ID, "First", TEXT)
    assert saved_conversations.rename(ID, "  Another \n one ") == "Another one"
    assert saved_conversations.titles() == [("Another one", ID)]
    with pytest.raises(UserError, match="empty"):
        saved_conversations.rename(ID, "  ")
    assert saved_conversations.shortened("x" * 100) == "x" * 59 + "…"
    saved_conversations.delete(ID)
    saved_conversations.delete(ID)
    assert saved_conversations.titles() == [] and not saved_conversations.exists(ID)


@pytest.mark.parametrize("bad", ["../../etc/passwd", "x", "", "0123456789ABCDEF", ID + "/..", ID + "\n"])
def test_only_an_id_becomes_a_path(bad):
    assert not saved_conversations.exists(bad)
    for use in (
        saved_conversations.read,
        saved_conversations.delete,
        lambda name: saved_conversations.write(name, "t", TEXT),
    ):
        with pytest.raises(UserError, match="no such conversation"):
            use(bad)


def test_other_files_are_not_listed_and_raise_when_read(folder):
    saved_conversations.write(ID, "First", TEXT)
    (folder / "notes.json").write_text("{}")
    (folder / f"{OTHER}.json").write_text("{")
    assert saved_conversations.titles() == [("First", ID)]
    with pytest.raises(UserError, match="not JSON"):
        saved_conversations.read(OTHER)
    (folder / f"{OTHER}.json").write_text("[1]")
    with pytest.raises(UserError, match="JSON object"):
        saved_conversations.read(OTHER)
    assert saved_conversations.titles() == [("First", ID)]


def test_the_folder_of_each_platform(monkeypatch, tmp_path):
    monkeypatch.delenv("MLX_LLAMA3_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(saved_conversations.sys, "platform", "darwin")
    assert saved_conversations.data_dir() == tmp_path / "Library" / "Application Support" / "mlx-llama3"
    monkeypatch.setattr(saved_conversations.sys, "platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert saved_conversations.data_dir() == tmp_path / ".local" / "share" / "mlx-llama3"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert saved_conversations.data_dir() == tmp_path / "xdg" / "mlx-llama3"
