"""Reading and writing files that the user named, and the one-line errors."""

import json
import os
from pathlib import Path

import pytest

from mlx_llama3.errors import UserError
from mlx_llama3.system.files import check_place, parse_json, read_bytes, read_json, read_some_text, read_text, replacing


def test_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffGrüße\r\n".encode())
    assert read_text(path) == "Grüße\r\n"
    assert read_bytes(path) == "\ufeffGrüße\r\n".encode()


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="absent: no such file$"):
        read_bytes(tmp_path / "absent")
    with pytest.raises(UserError, match="cannot be read: Is a directory$"):
        read_text(tmp_path)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="latin is not UTF-8 text: unexpected end of data at byte 3$"):
        read_text(tmp_path / "latin")


def test_what_cannot_be_written(tmp_path, monkeypatch):
    check_place(tmp_path / "new")
    check_place(tmp_path.joinpath(os.devnull))
    with pytest.raises(UserError, match="is a folder; name a file$"):
        check_place(tmp_path)
    with pytest.raises(UserError, match=f"new: there is no folder {tmp_path / 'no'}; make it, or name another file$"):
        check_place(tmp_path / "no" / "new")
    with pytest.raises(UserError, match="x: cannot be written: File name too long; name another file$"):
        check_place(tmp_path / ("x" * 300))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root, as in containers, may write everywhere
    with pytest.raises(UserError, match="new: cannot be written: permission denied; name another file$"):
        check_place(tmp_path / "new")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_json(encoding):
    assert parse_json(json.dumps({"a": "é🙂"}, ensure_ascii=False).encode(encoding), "a.json") == {"a": "é🙂"}
    assert parse_json('"é"', "a.json") == "é"


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b"9" * 10_000, "nan"])
def test_what_is_not_json(text):
    with pytest.raises(UserError, match="^a.json is not JSON: ") as refused:
        parse_json(text, "a.json")
    assert "\n" not in str(refused.value)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    with replacing(path) as partial:
        partial.write_text("first")
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt), replacing(path, ".b") as partial:
        assert partial.name.endswith(".b")
        partial.write_text("half")
        raise KeyboardInterrupt
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"] and path.read_text() == "first"
    with pytest.raises(OSError, match="File name too long"), replacing(tmp_path / ("x" * 300)) as partial:
        partial.write_text("")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "\xff"])
def test_read_json_names_the_file(tmp_path: Path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="config.json"):
        read_json(path)
    with pytest.raises(UserError, match="no such file"):
        read_json(tmp_path / "absent.json")


def test_read_json(tmp_path: Path):
    (tmp_path / "a.json").write_text(json.dumps({"x": 1}))
    assert read_json(tmp_path / "a.json") == {"x": 1}


@pytest.mark.parametrize(
    "content, message", [(b"\xff\xfe", "is not UTF-8 text"), (b" \n", "is empty"), (None, "no such file")]
)
def test_text_that_must_not_be_empty(tmp_path, content, message):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_some_text(path)
    assert str(error.value).startswith(str(path)) and message in str(error.value)
