"""`mlx-llama3 cache`, and `--prompt-cache` of generate and chat."""

import io
import json
import signal
import subprocess
import sys

import pytest

from app import cli
from app.chat import loop as chat
from app.options import prompt_cache as prompt_caches, request

TEXT = "The lighthouse of Varn was built in 1874 by two sisters. " * 8


@pytest.fixture
def run(opened, monkeypatch, capsys):
    """Run a command in this process with the model that is loaded already; returns (code, output, errors)."""
    for module in (prompt_caches, request, chat):
        monkeypatch.setattr(module, "open_model", lambda name: opened)

    def run(*words: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = cli.main(list(map(str, words)))
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("options", [[], ["--max-kv-size", "60"], ["--kv-bits", "8"]], ids=str)
def test_the_same_answer_with_less_to_read(run, text, tmp_path, options):
    out = tmp_path / "c.safetensors"
    code, output, _ = run("cache", "--prompt-file", text, "--out", out, *options)
    assert code == 0 and f"{out}: " in output
    asked = ["generate", "-p", f"{TEXT}\nWho built it?", "--json", "--max-tokens", "12"]
    plain = json.loads(run(*asked, *options)[1])
    code, output, errors = run(*asked, "--prompt-cache", out)
    cached = json.loads(output)
    assert code == 0
    assert cached["ids"] == plain["ids"]
    saved = len(plain["prompt_ids"]) - cached["stats"]["prompt_tokens"]
    assert saved > 100 and f"{out} saves {saved} of the prompt's {len(plain['prompt_ids'])} tokens" in errors
    errors = run("generate", "-p", "Hi", "--prompt-cache", out, "--max-tokens", "2")[2]
    assert " saves " in errors


def test_a_system_prompt_for_the_chat(run, text, tmp_path):
    out = tmp_path / "c.safetensors"
    assert run("cache", "--prompt-file", text, "--as", "system", "--out", out)[0] == 0
    talk = ["chat", "--system", TEXT, "--max-tokens", "8"]
    lines = "Who built it?\nWhen?\n"
    code, plain, _ = run(*talk, stdin=lines)
    assert code == 0
    code, cached, errors = run(*talk, "--prompt-cache", out, stdin=lines)
    assert (code, cached) == (0, plain)
    held = int(errors.split(" of its ")[1].split()[0])
    assert f"{held} of its {held} tokens begin this chat" in errors


def test_what_a_window_has_forgotten_is_read_again_and_told(run, text, tmp_path):
    """The prompt leaves the text so early that the window has left that place, and little is saved."""
    out = tmp_path / "c.safetensors"
    text.write_text(TEXT * 4)
    run("cache", "--prompt-file", text, "--out", out, "--max-kv-size", "60")
    code, output, errors = run(
        *("generate", "-p", f"{TEXT}Why?", "--prompt-cache", out, "--json", "--max-tokens", "2"),
    )
    answer = json.loads(output)
    saved = len(answer["prompt_ids"]) - answer["stats"]["prompt_tokens"]
    assert code == 0 and saved < 60
    assert f"{out} saves {saved} of the prompt's {len(answer['prompt_ids'])} tokens" in errors


def test_raw_text(run, text, tmp_path):
    out = tmp_path / "c.safetensors"
    run("cache", "--prompt-file", text, "--as", "raw", "--out", out)
    asked = ["generate", "--raw", f"{TEXT}The sisters", "--max-tokens", "6"]
    assert run(*asked, "--prompt-cache", out)[1] == run(*asked)[1]


@pytest.mark.parametrize(
    ("ignored", "code"), [(False, -signal.SIGINT), (True, 3)], ids=["at work", "in the background"]
)
def test_ctrl_c_while_the_text_is_read(demo_folder, text, tmp_path, ignored, code):
    """It ends the process itself, and not, as Python has it, once MLX is done with a chunk."""
    words = ["cache", "--prompt-file", str(text), "--out", str(tmp_path / "c.safetensors")]
    script = (
        "import os, signal, sys\n"
        f"if {ignored}: signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from app import cli; from app.options import prompt_cache\n"
        "def prefill(*_, **__): os.kill(os.getpid(), signal.SIGINT); sys.exit(3)\n"
        f"prompt_cache.prefill = prefill; sys.exit(cli.main({words}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".safetensors"] == []


def test_refusals(run, text, tmp_path, monkeypatch):
    out = tmp_path / "c.safetensors"
    run("cache", "--prompt-file", text, "--out", out)
    for words, said in (
        (["--max-kv-size", "64"], "was made without --max-kv-size, not 64"),
        (["--scale", "1:mlp=0"], "does not go with --scale"),
    ):
        code, output, errors = run("generate", "-p", "Hi", "--prompt-cache", out, *words)
        assert (code, output) == (2, "") and said in errors
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    for words, said in (
        (["--prompt-file", empty, "--out", out], "is empty"),
        (["--prompt-file", tmp_path / "no.txt", "--out", out], "no such file"),
        (["--prompt-file", text, "--out", text], "choose another name"),
        (["--prompt-file", text, "--out", tmp_path / "no" / "c.safetensors"], "there is no folder"),
        (["--prompt-file", text, "--out", tmp_path / ("x" * 250)], "cannot write the prompt cache"),
        (["--prompt-file", text, "--out", tmp_path / ("x" * 300)], "cannot be written: File name too long"),
        (["--prompt-file", text, "--out", out, "--as", "raw", "--system", "x"], "--system does not go with --as raw"),
        (["--prompt-file", text, "--out", out, "--context", "50"], "the context holds 50"),
    ):
        code, output, errors = run("cache", *words)
        assert (code, output) == (2, "")
        assert said in errors and errors.count("\n") == 1
    assert text.read_text() == TEXT
    monkeypatch.setattr(request, "open_model", lambda name: pytest.fail("a model is loaded"))
    assert "not a prompt cache" in run("generate", "-p", "Hi", "--prompt-cache", text)[2]
