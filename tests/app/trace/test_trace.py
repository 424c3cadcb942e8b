"""`mlx-llama3 trace`: its files match plain generation, `--show` matches the file, and bad input is refused."""

import io
import json
import os
import pty
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from app import cli
from app.colours import DIVERGING_DARK, DIVERGING_LIGHT, SEQUENTIAL, ramp, terminal_ramp
from app.options.edits import edit_text, scale_edit
from mlx_llama3.model.hooks.norms import POINTS
from mlx_llama3.trace.store import Trace, load_trace

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "smollm2-greedy.json").read_text(encoding="utf-8"))[0]
QUESTION = GOLDEN["messages"][0]["content"]


@pytest.fixture
def run(opened, monkeypatch, capsys):
    """Run a command in this process with the loaded model; returns (code, output, errors)."""
    monkeypatch.setattr("app.options.request.open_model", lambda name: opened)

    def run(*words: object) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def written(tmp_path) -> Path:
    """A small trace: 3 layers, 5 tokens, all norms different, those of the first token far above the others."""
    norms = np.arange(5 * 3 * 5, dtype=np.float32).reshape(5, 3, 5) + 1
    norms[:, :, 0] = 5000
    pieces = ["<s>", "a", "\x1b[31m", "b\n", "c"]
    trace = Trace("tiny", np.arange(5, dtype=np.int32), pieces, norms, {"logits": np.zeros((5, 7), np.float32)})
    trace.save(tmp_path / "written.safetensors")
    return tmp_path / "written.safetensors"


def test_the_answer_is_that_of_generate_and_its_norms_are_the_recorded_ones(run, tmp_path):
    out = tmp_path / "t.safetensors"
    code, text, err = run("trace", "--prompt", QUESTION, "--max-tokens", 3, "--save", "norms,attention", "--out", out)
    assert (code, text) == (0, "The capital of\n")
    assert err.startswith(f"{out}: {len(GOLDEN['prompt_ids']) + 3} tokens, 30 layers, norms, attention, ")
    trace = load_trace(out)
    assert trace.tokens.tolist() == GOLDEN["prompt_ids"] + GOLDEN["new_ids"][:3]
    at = len(GOLDEN["prompt_ids"]) - 1
    # The reference has the stream before each layer at the last prompt token; tolerance 0.5 %.
    assert trace.norm("resid_pre")[:, at] == pytest.approx(GOLDEN["residual_norms_last_token"], rel=5e-3)
    assert set(trace.extra) == {f"attention/{layer}" for layer in range(30)}
    assert trace.extra["attention/7"].shape == (9, at + 4, at + 4)
    assert trace.pieces[-2:] == [" capital", " of"]
    assert trace.settings["edits"] == [] and trace.settings["finish_reason"] == "length"


def test_an_edit_reaches_the_model(run, tmp_path):
    out = tmp_path / "t.safetensors"
    scale = ["--scale", "3:mlp=0", "--scale", "5:head:2=0.5"]
    assert run("trace", "--prompt", QUESTION, "--max-tokens", 1, "--out", out, *scale)[0] == 0
    trace = load_trace(out)
    assert (trace.norm("mlp_out")[3] == 0).all() and (trace.norm("mlp_out")[4] > 0).all()
    assert trace.settings["edits"] == ["3:mlp=0", "5:head:2=0.5"]
    _, plain, _ = run("generate", "--prompt", QUESTION, "--max-tokens", 4)
    code, quiet, _ = run("generate", "--prompt", QUESTION, "--max-tokens", 4, "--scale", "0:mlp=0")
    assert code == 0 and quiet != plain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scale", "3:norm=0", "--out", "t"], "'3:norm=0' is not LAYER:BRANCH=FACTOR"),
        (["--scale", "3:mlp=x", "--out", "t"], "'x' is not a number"),
        (["--save", "weights", "--out", "t"], "'weights' is none of norms, residuals, logits, attention"),
        (["--out", "t", "--show", "t"], "not allowed with argument"),
        ([], "one of the arguments --out --show is required"),
        (["--show", "t", "--prompt", "a"], "--show takes no prompt"),
        (["--show", "t", "--tokens", "5"], "'5' is not A:B"),
        (["--show", "missing.safetensors"], "missing.safetensors: no such file"),
        (["--prompt", "a", "--out", "."], "is a folder"),
        (["--prompt", "a", "--out", "no/such/t"], "there is no folder no/such"),
        (["--prompt", "a", "--out", "t", "--scale", "30:mlp=0"], "layers 0 to 29"),
    ],
)
def test_refused(run, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("trace", *words)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_shown_without_colour(run, written):
    code, out, err = run("trace", "--show", written, "--point", "attn_out")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "tiny: 5 tokens, 3 layers;"
    assert lines[1] == "also holds logits (5, 7)"
    # The norms of attn_out are 16 + 5 * layer + token; the first token does not count for the scale.
    assert lines[3].startswith("attn_out, L2 norm, logarithmic from 17 to 30; layer 0 at the bottom")
    assert [line.split()[0] for line in lines[5:8]] == ["2", "1", "0"]
    assert lines[5].endswith("@") and lines[7][5:7] == "@."
    table = lines[-3:]
    assert table[0].split()[:4] == ["0", "18.50", "48.50", "63.50"]
    assert table[2].endswith("4 'c'")
    assert "\x1b" not in out


def test_a_token_cannot_steer_the_terminal(run, written):
    trace = load_trace(written)
    trace.norms[:, :, 2] = 900
    trace.save(written)
    _, out, _ = run("trace", "--show", written)
    assert "2 '\\x1b[31m'" in out and "\x1b" not in out


def test_many_tokens_share_columns(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "46")  # 40 of them for tokens
    norms = np.ones((5, 2, 100), np.float32)
    norms[:, 1, 50] = 7
    path = tmp_path / "t.safetensors"
    Trace("tiny", np.zeros(100, np.int32), ["x"] * 100, norms).save(path)
    _, out, _ = run("trace", "--show", path)
    assert "a column is the largest of 3 tokens" in out
    top = next(line for line in out.splitlines() if line.startswith("   1 "))
    assert top[5:].index("@") == 50 // 3 and len(top) == 5 + 34
    _, out, _ = run("trace", "--show", path, "--tokens", "40:60")
    top = next(line for line in out.splitlines() if line.startswith("   1 "))
    assert top[5:].index("@") == 10 and len(top) == 5 + 20
    assert run("trace", "--show", path, "--tokens", "100:")[0] == 2


def drained(reader: int) -> bytes:
    """All output of a terminal until its other end is closed; a single read may return only a part of it."""
    out = b""
    with suppress(OSError), os.fdopen(reader, "rb", buffering=0) as terminal:  # Linux signals the end by an error
        while piece := terminal.read(65536):
            out += piece
    return out


def test_colour_and_half_blocks_on_a_terminal(written, monkeypatch):
    reader, writer = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with ThreadPoolExecutor(1) as thread:  # reads meanwhile: on BSD, writing waits once some kilobytes are unread
        read = thread.submit(drained, reader)
        with os.fdopen(writer, "w") as terminal:
            monkeypatch.setattr(sys, "stdout", terminal)
            assert cli.main(["trace", "--show", str(written)]) == 0
            monkeypatch.undo()
    out = read.result().decode()
    rows = [line for line in out.splitlines() if "▀" in line]
    assert len(rows) == 2 and [row.count("▀") for row in rows] == [5, 5]  # 3 layers, two a line
    palette = terminal_ramp()
    assert f"\x1b[38;5;{palette[-1]}m" in rows[0]  # the largest: last layer, last token
    assert re.search(rf"\x1b\[38;5;{palette[0]}m\x1b\[49m▀", rows[1])  # the smallest, with nothing below it


@pytest.mark.parametrize("text", ["3:mlp=0", "0:attention=-1.5", "12:head:3=0.25"])
def test_edits_as_text(text):
    assert edit_text(scale_edit(text)) == text


@pytest.mark.parametrize("stops", [SEQUENTIAL, DIVERGING_DARK, DIVERGING_LIGHT])
def test_ramps_take_even_steps(stops):
    colours = ramp(stops).astype(int)
    assert colours.shape == (256, 3)
    steps = np.abs(np.diff(colours, axis=0)).max(-1)
    assert steps.max() <= 8
    luminance = colours @ [0.2126, 0.7152, 0.0722]
    if stops is SEQUENTIAL:
        assert (np.diff(luminance) > -1).all() and luminance[-1] - luminance[0] > 180
    else:
        assert abs(luminance[0] - luminance[-1]) < 40


def test_points_are_the_librarys():
    from app.commands import trace as trace_command
    from mlx_llama3.trace.running import SAVE

    assert trace_command.POINTS == POINTS and trace_command.SAVE == SAVE


def test_standard_input_is_the_prompt_too(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(QUESTION.encode() + b"\n")))
    out = tmp_path / "t.safetensors"
    assert run("trace", "--max-tokens", 1, "--out", out)[0] == 0
    assert load_trace(out).tokens[:-1].tolist() == GOLDEN["prompt_ids"]
