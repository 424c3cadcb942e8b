"""What holds for the project as a whole: its dependencies and its commands."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_llama3_main import OwnFolders

ROOT = Path(__file__).parents[1]
HEAVY = {"mlx", "numpy", "huggingface_hub", "tiktoken", "jinja2", "prompt_toolkit", "tqdm", "safetensors", "gradio"}


@pytest.mark.parametrize("command", [["--help"], ["chat", "--help"], ["app", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(command):
    script = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('imported:', *sorted({HEAVY!r} & set(sys.modules))))\n"
        f"from app.cli import main; sys.exit(main({command!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "imported:"


@pytest.mark.parametrize("python", ["3.11", "3.14"])
def test_dependencies_resolve_for_a_mac(python):
    # 14.0 is the oldest macOS that MLX has wheels for.
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--extra", "test"]
        + ["--only-binary", ":all:", "--python-platform", "macos", "--python-version", python, "pyproject.toml"],
        env=os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if "error sending request" in done.stderr or "dns error" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    packages = set(re.findall(r"^[\w-]+", done.stdout, re.MULTILINE))
    assert {"mlx", "mlx-metal", "mlx-lm"} <= packages
    assert not {"mlx-cpu", "cmeel-openblas"} & packages


@pytest.fixture(autouse=True)
def outside_of_make(monkeypatch):
    """`make test` runs these tests; a `make` started by them is to behave as one started by a person."""
    for name in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A clone in which everything is installed, with a program in the chat's place that tells what it is given."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    program = tmp_path / ".venv" / "bin" / "mlx-llama3"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "given: $*"\nexec cat\n')
    program.chmod(0o755)
    (tmp_path / ".venv" / "installed").touch()
    return tmp_path


def test_make_chat_passes_input_and_arguments_on(installed):
    done = subprocess.run(
        ["make", "chat", 'ARGS=--model demo --system "Be brief."'],
        cwd=installed,
        input="What is the capital of France?\nAnd of Spain?\n",
        capture_output=True,
        text=True,
    )
    assert done.stdout == (
        "given: chat --model demo --system Be brief.\nWhat is the capital of France?\nAnd of Spain?\n"
    )
    assert done.stderr == ""


def test_make_chat_without_a_suitable_python_says_how_to_get_one(installed):
    shutil.rmtree(installed / ".venv")
    old = installed / "bin" / "python3"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\nexit 1\n")  # as Python 3.9 answers the question whether it is 3.11
    old.chmod(0o755)
    done = subprocess.run(
        [shutil.which("make"), "chat", f"PYTHON={old}"], cwd=installed, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "needs Python 3.11 or newer" in done.stderr
    assert "brew install python" in done.stderr and "apt install python3 python3-venv" in done.stderr
    assert not (installed / ".venv").exists()


@pytest.mark.parametrize("command", [["-m", "mlx_llama3"], ["-m", "mlx_llama3_main", "app.cli"]])
def test_files_of_a_person_do_not_stand_in_for_the_program(tmp_path, command):
    for name in ("app.py", "convert.py"):
        (tmp_path / name).write_text("raise SystemExit('the file of a person was run')\n")
    done = subprocess.run(
        [sys.executable, *command, "convert", str(tmp_path / "absent"), str(tmp_path / "target")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path / 'absent'}: ")


def test_the_door_finds_its_folders_where_it_lies():
    assert OwnFolders.find_spec("app").origin == str(ROOT / "app" / "__init__.py")
    assert OwnFolders.find_spec("apple") is None
