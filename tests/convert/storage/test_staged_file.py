"""A staged file appears complete or not at all, whatever happens meanwhile."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from convert.storage.staged_file import staged_file
from mlx_llama3.errors import UserError


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_appears_at_the_end(tmp_path):
    target = tmp_path / "new" / "file.gguf"
    with staged_file(target) as file:
        file.write(b"content")
        assert not target.exists()
    assert target.read_bytes() == b"content"
    assert names(target.parent) == ["file.gguf"]


def test_nothing_is_left_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), staged_file(tmp_path / "file") as file:
        file.write(b"half")
        raise RuntimeError
    assert names(tmp_path) == []


def test_flushed_before_it_appears_and_the_rename_after(tmp_path, monkeypatch):
    flushed, target = [], tmp_path / "x.gguf"
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append((os.fstat(file).st_ino, target.exists())))
    with staged_file(target) as file:
        file.write(b"x")
    assert flushed == [(target.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_disk_that_becomes_full(tmp_path):
    with pytest.raises(UserError, match="x.gguf: the disk is full; make room"), staged_file(tmp_path / "x.gguf"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_existing_target(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(UserError, match="exists already.*--overwrite"), staged_file(target):
        pass
    with pytest.raises(RuntimeError), staged_file(target, overwrite=True) as file:
        file.write(b"half")
        raise RuntimeError
    assert target.read_text() == "old"
    with staged_file(target, overwrite=True) as file:
        file.write(b"new")
    assert target.read_text() == "new"


def test_a_folder_is_never_replaced(tmp_path):
    with pytest.raises(UserError, match="give the name of a file"), staged_file(tmp_path, overwrite=True):
        pass


def test_folder_that_cannot_be(tmp_path):
    (tmp_path / "plain").write_text("")
    with pytest.raises(UserError, match="cannot be written"), staged_file(tmp_path / "plain" / "file"):
        pass


def test_a_killed_run_leaves_no_target_and_the_next_cleans_up(tmp_path):
    script = """
import sys, time
from pathlib import Path
from convert.storage.staged_file import staged_file
with staged_file(Path(sys.argv[1])) as file:
    file.write(b"half"); file.flush(); print("ready", flush=True); time.sleep(60)
"""
    target = tmp_path / "file[1]"
    run = subprocess.Popen([sys.executable, "-c", script, str(target)], stdout=subprocess.PIPE, cwd=os.getcwd())
    assert run.stdout.readline() == b"ready\n"
    with pytest.raises(UserError, match="another conversion is writing it"), staged_file(target):
        pass
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert len(names(tmp_path)) == 1 and not target.exists()
    with staged_file(target) as file:
        file.write(b"whole")
    assert names(tmp_path) == ["file[1]"]


def test_the_partial_file_is_locked_while_it_is_written(tmp_path):
    with staged_file(tmp_path / "file"):
        (partial,) = tmp_path.iterdir()
        with open(partial, "rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
