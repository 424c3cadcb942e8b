"""The project's modules see macOS, others see the system as it is."""

import json
import os
import socket
import sys

import pytest

from tests.mac import macos
from tests.mac.compute import COMPILED
from tests.mac.imports import is_of_project, project_builtins
from tests.mac.start import VARIABLE, start
from tests.mac.tests.conftest import ROOT, on_a_mac


def test_a_module_of_the_project_sees_macos_at_its_head_and_within_functions():
    program = """
import json, sys
from tests.mac.start import started
from tests.mac.tests.seen import run
ours = run({"__name__": "m", "__builtins__": started().builtins})
print(json.dumps([ours, run({"__name__": "m"}), sys.platform]))
"""
    done = on_a_mac(COMPILED, "-c", program)
    assert done.returncode == 0, done.stderr
    ours, theirs, platform = json.loads(done.stdout)
    assert ours == {
        "platforms": ["darwin", "darwin", "Darwin", "arm64", "arm64"],
        "affinity": False,
        "paths": [False, False, True],
        "text": "missing",
        "open": "missing",
        "keepalive": [True, False],
    }
    assert theirs["platforms"][0] == platform == "linux"
    assert theirs["affinity"] and theirs["paths"] == [True] * 3 and theirs["text"] != "missing" != theirs["open"]


def test_a_view_is_written_to_as_the_module_itself(monkeypatch):
    views = macos.views()
    system = views["sys"]
    monkeypatch.setattr(system, "argv", ["a"])
    assert sys.argv == ["a"]
    monkeypatch.setattr(system, "platform", "other")
    assert system.platform == "other" and sys.platform == "linux"
    monkeypatch.undo()
    assert system.platform == "darwin"
    monkeypatch.setattr(views["os"], "sched_getaffinity", len, raising=False)
    assert views["os"].sched_getaffinity is len is not os.sched_getaffinity
    monkeypatch.undo()
    with pytest.raises(AttributeError, match="'os' has no attribute 'sched_getaffinity' on macOS"):
        views["os"].sched_getaffinity  # noqa: B018


def test_macos_number_for_unanswered_data_is_taken(monkeypatch):
    monkeypatch.setattr(socket.socket, "setsockopt", macos.setsockopt)
    with socket.socket() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, 0x80, 7)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


def test_builtins_are_looked_up_where_tests_replace_them(monkeypatch):
    namespace = {"__name__": "m", "__builtins__": project_builtins()}
    exec("def ask(): return input()\ndef wrong(): return undefined", namespace)
    monkeypatch.setattr("builtins.input", lambda: "answer")
    assert namespace["ask"]() == "answer"
    with pytest.raises(NameError, match="name 'undefined' is not defined"):
        namespace["wrong"]()


def test_which_files_are_the_projects():
    ours = ("app/cli.py", "mlx_llama3/api.py", "mlx_llama3_main.py", "tests/conftest.py", "tests/support/ranks.py")
    others = (".venv/lib/app/x.py", "tests/mac/gpu.py", "tests/metal_harness/build.py", "mlx_llama3/system/blas.py")
    assert all(is_of_project(str(ROOT / path)) for path in ours)
    assert not any(is_of_project(str(path)) for path in (*(ROOT / path for path in others), "/usr/lib/app/cli.py"))
    assert not is_of_project(None)


def test_it_starts_first_or_not_at_all():
    with pytest.raises(ValueError, match=f"{VARIABLE} is 'x'; it must be one of compiled, kernels"):
        start("x")
    with pytest.raises(RuntimeError, match="the stand-in starts before mlx.core is loaded"):
        start(COMPILED)


def test_programs_that_a_test_starts_are_on_the_mac_too(tmp_path):
    """Also in an environment of their own, behind a link, and through a pseudo-terminal."""
    (tmp_path / "test_it.py").write_text(
        "import os, subprocess, sys, tempfile, pexpect\n"
        "SEEN = 'import mlx.core as mx; print(mx.default_device() == mx.gpu)'\n"
        "def test_it():\n"
        "    for env in (None, os.environ | {'PYTHONPATH': '/nowhere'}):\n"
        "        assert subprocess.check_output([sys.executable, '-c', SEEN], env=env) == b'True\\n'\n"
        "    assert pexpect.run(f'{sys.executable} -c \"{SEEN}\"', env=env) == b'True\\r\\n'\n"
        "    assert tempfile.gettempdir().endswith('/var/folders')\n"
        "    assert os.path.realpath(tempfile.gettempdir()).endswith('/private/var/folders')\n"
    )
    done = on_a_mac(
        COMPILED, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "tests.mac.plugin", "-c", os.devnull, tmp_path
    )
    assert done.returncode == 0, done.stdout
