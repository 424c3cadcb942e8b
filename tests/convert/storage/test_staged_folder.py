"""A folder appears complete or not at all, and the leftovers of dead processes are removed."""

import errno
import os
import subprocess
import sys
import textwrap

import pytest

from convert.storage.staged_file import staged_file
from convert.storage.staged_folder import staged_folder
from mlx_llama3.errors import UserError


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_appears_at_the_end(tmp_path):
    with staged_folder(tmp_path / "deep" / "model") as folder:
        (folder / "config.json").write_text("{}")
        assert not (tmp_path / "deep" / "model").exists()
    assert names(tmp_path / "deep") == ["model"] and names(tmp_path / "deep" / "model") == ["config.json"]


@pytest.mark.parametrize("error", [UserError("no"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_failure(tmp_path, error):
    with pytest.raises(type(error)), staged_folder(tmp_path / "model") as folder:
        (folder / "config.json").write_text("{}")
        raise error
    assert names(tmp_path) == []


def test_all_is_flushed_before_it_appears_and_the_rename_after(tmp_path, monkeypatch):
    flushed, target = [], tmp_path / "out"

    def fsync(file: int) -> None:
        flushed.append((os.fstat(file).st_ino, target.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with staged_folder(target) as folder:
        (folder / "below").mkdir()
        for name in ("a", "below/b"):
            (folder / name).write_text("x")
    inside = {path.stat().st_ino for path in (target, *target.rglob("*"))}
    assert len(inside) == 4 and {inode for inode, appeared in flushed if not appeared} == inside
    assert flushed[-1] == (tmp_path.stat().st_ino, True)


def test_disk_that_becomes_full(tmp_path):
    with pytest.raises(UserError, match="out: the disk is full; make room"), staged_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UserError, match="^f: Permission denied; check the file"), staged_folder(tmp_path / "out"):
        raise PermissionError(errno.EACCES, "Permission denied", "f")
    assert list(tmp_path.iterdir()) == []


def test_existing_target(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("old")
    with (
        pytest.raises(UserError, match="exists already; give another target, or --overwrite"),
        staged_folder(tmp_path / "model"),
    ):
        pass
    with pytest.raises(UserError, match="stop"), staged_folder(tmp_path / "model", overwrite=True) as folder:
        raise UserError("stop")
    assert (tmp_path / "model" / "config.json").read_text() == "old"
    with staged_folder(tmp_path / "model", overwrite=True) as folder:
        (folder / "config.json").write_text("new")
        assert (tmp_path / "model" / "config.json").read_text() == "old"
    assert (tmp_path / "model" / "config.json").read_text() == "new" and names(tmp_path) == ["model"]


def test_a_folder_of_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    for name in ("photos", "file", "link"):
        with pytest.raises(UserError, match="is not a model folder"), staged_folder(tmp_path / name, overwrite=True):
            pass
    assert names(tmp_path / "photos") == ["cat.jpg"]


def test_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), staged_folder(tmp_path / "file" / "model"):
        pass


def killed(tmp_path, body: str) -> None:
    """Run a program that ends by killing itself."""
    program = f"""
        import os, pathlib, signal
        from convert.storage import staged_folder as staging
        target = pathlib.Path({str(tmp_path / "mo[d]el")!r})
        die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program) + textwrap.dedent(body)])
    assert done.returncode == -9


def test_leftover_of_a_killed_run_is_removed_by_the_next(tmp_path):
    killed(tmp_path, "with staging.staged_folder(target) as folder:\n    (folder / 'x').write_text('half'); die()")
    (left,) = names(tmp_path)
    assert left.startswith(".mo[d]el.partial-")
    with staged_folder(tmp_path / "mo[d]el") as folder:
        (folder / "config.json").write_text("{}")
    assert names(tmp_path) == ["mo[d]el"]


@pytest.mark.parametrize("step", ["staging.Path.rename", "staging.shutil.rmtree"])
def test_killed_while_replacing(tmp_path, step):
    """Killed between the two renames, when the old folder has another name: the next run restores it, or removes it."""
    target = tmp_path / "mo[d]el"
    target.mkdir()
    (target / "config.json").write_text("old")
    body = f"""
        with staging.staged_folder(target, overwrite=True) as folder:
            (folder / "config.json").write_text("new")
            first = staging.Path.rename
            if {step == "staging.Path.rename"}:
                staging.Path.rename = lambda self, to: die() if "partial" in self.name else first(self, to)
            else:
                staging.shutil.rmtree = die
        """
    killed(tmp_path, body)
    assert len(names(tmp_path)) == 2
    with pytest.raises(UserError, match="stop"), staged_folder(target, overwrite=True):
        raise UserError("stop")
    assert names(tmp_path) == ["mo[d]el"]
    assert (target / "config.json").read_text() == ("old" if "rename" in step else "new")


def test_a_run_that_is_alive_is_left_alone(tmp_path):
    with staged_folder(tmp_path / "model") as folder:
        (folder / "x").write_text("")
        program = f"""
            from pathlib import Path
            from convert.storage.staged_folder import staged_folder
            with staged_folder(Path({str(tmp_path / "model")!r})):
                pass
            """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
        assert "another conversion is writing it now" in done.stderr
        assert (folder / "x").exists()
    assert names(tmp_path) == ["model"]
    assert os.listdir(tmp_path / "model") == ["x"]


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("staged", [staged_folder, staged_file])
def test_a_name_that_is_too_long_is_told(tmp_path, staged, overwrite):
    for target in (tmp_path / ("a" * 300), tmp_path / ("a" * 300) / "model", tmp_path / ("b" * 250)):
        with pytest.raises(UserError, match="File name too long"), staged(target, overwrite=overwrite):
            pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["partial", "replaced"])
def test_strangers_with_the_names_of_leftovers_are_left_alone(tmp_path, kind):
    (tmp_path / f".model.{kind}-1").write_text("mine")
    (tmp_path / f".model.{kind}-2").symlink_to("/nowhere")
    with staged_folder(tmp_path / "model") as folder:
        (folder / "config.json").write_text("{}")
    assert names(tmp_path) == [f".model.{kind}-1", f".model.{kind}-2", "model"]
    with staged_file(tmp_path / "model.gguf") as file:
        file.write(b"GGUF")
    assert (tmp_path / f".model.{kind}-1").read_text() == "mine"
