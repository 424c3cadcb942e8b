"""`doctor --report`: what is in the file and what is not, and what becomes of a section whose process ends."""

import json
import os
import sys
from pathlib import Path

import pytest

from app import cli
from app.report import decoding, report
from app.report.report import _anonymous, _json_of
from mlx_llama3.model.kernels.kernel_set import REFERENCE


def test_the_whole_file(demo_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "mlx_lm_version", lambda: None)  # it is slow here, and has a test in test_bench
    monkeypatch.setattr(report, "_run", lambda section, folder: {"section": section})
    out = tmp_path / "mine.json"
    assert cli.main(["doctor", "--model", str(demo_folder), "--report", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: written; docs/mac-results.md says how to send it\n"
    content = json.loads(out.read_text())
    assert list(content) == [
        "format", "version", "machine", "matrices", "model", "kernels", "sections", "mlx-lm",
    ]  # fmt: skip
    assert content["model"]["quantization"] == {"bits": 4, "group_size": 32, "mode": "affine"}
    assert (content["model"]["n_layers"], content["model"]["dim"]) == (30, 576)
    assert content["sections"]["decoding"] == {"section": "decoding"}
    for private in (str(Path.home()), str(demo_folder), os.uname().nodename, "SmolLM"):
        assert private not in out.read_text()


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "find_model", lambda name: pytest.fail("a model is looked for"))
    assert cli.main(["doctor", "--report", str(tmp_path / "absent" / "mine.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_decoding_is_measured_and_the_tokens_are_compared(opened, monkeypatch):
    monkeypatch.setattr(decoding, "TOKENS", 4)
    monkeypatch.setattr(decoding, "ROUNDS", 1)
    section = decoding.decoding_section(opened.model, opened.tokenizer, REFERENCE)
    assert section["greedy"] == {"tokens": 48, "first difference": None}
    assert set(section["decode"]) == set(section["readings"]) and len(section["decode"]) == 4
    assert all(speed > 0 for speed in section["decode"].values())
    assert section["memory"]["peak"] > section["memory"]["weights"] > 10**8


def test_tokens_that_differ_are_told(opened, monkeypatch):
    answers = iter([[1, 2, 3], [1, 9, 3]])
    monkeypatch.setattr(
        decoding, "generate", lambda *_, **__: [type("Step", (), {"token": token}) for token in next(answers)]
    )
    assert decoding._agreement(opened.model, opened.tokenizer, REFERENCE) == {"tokens": 3, "first difference": 1}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("print('log'); print('{\"a\": 1}')", {"a": 1}),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", {"failed": "SIGABRT: no reason given"}),
        ("import sys; print('first\\nlast', file=sys.stderr); sys.exit(2)", {"failed": "exit code 2: last"}),
    ],
)
def test_a_section_that_ends_its_process(script, expected):
    assert _json_of([sys.executable, "-c", script]) == expected


def test_a_section_that_hangs(monkeypatch):
    monkeypatch.setattr(report, "TIMEOUT_SECONDS", 0.2)
    assert _json_of([sys.executable, "-c", "import time; time.sleep(60)"]) == {"failed": "not done after 0.2 s"}


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("/Users/ada/models/llama: no such file", "llama: no such file"),
        ("error in ~/secret/kernel.metal:12: expected ';'", "error in kernel.metal:12: expected ';'"),
        ("delete '/Users/ada/Library/Caches/mlx-llama3/kernels.json'", "delete 'kernels.json'"),
        ("3 of 4 tokens/s, heads(9,3)/64", "3 of 4 tokens/s, heads(9,3)/64"),
    ],
)
def test_no_path_is_left(text, without):
    assert _anonymous({"a": [text, 1]}) == {"a": [without, 1]}
