"""The file of decisions: it round-trips, no content of it is an error, and two processes share it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_llama3.autotune import decisions
from mlx_llama3.autotune.decisions import FORMAT, Decision, DecisionFile
from mlx_llama3.model.kernels.kernel_set import Rows

FAST = Decision("used", "one token: 0.80 of the reference's time", 0.8)
SLOW = Decision("slower", "a draft of 3 tokens: 1.20 of the reference's time", 1.2)
A = {Rows.ONE: FAST, Rows.FEW: SLOW}
B = {Rows.ALL: Decision("failed", "one token: output 0 holds NaN or infinity")}


def test_what_is_added_is_read(tmp_path, caplog) -> None:
    file = DecisionFile(tmp_path / "made" / "k.json")
    assert file.read() == {}
    file.add({"a": A})
    file.add({"b": B})
    assert DecisionFile(file.path).read() == {"a": A, "b": B}
    file.add({"a": B})
    assert file.read() == {"a": B, "b": B}
    assert sorted(os.listdir(file.path.parent)) == ["k.json", "k.lock"]
    assert not caplog.records


def content(**changes) -> str:
    decision = {"state": "used", "reason": "fast", "ratio": 0.5} | changes
    return json.dumps({"format": FORMAT, "decisions": {"a": {"ONE": decision}}})


@pytest.mark.parametrize(
    "text",
    [
        "",
        content()[:-9],
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        '{"format": 2, "decisions": []}',
        '{"format": 2, "decisions": {"a": 1}}',
        '{"format": 2, "decisions": {"a": {}}}',
        '{"format": 1, "decisions": {"a": {"state": "used", "reason": "fast", "ratio": 0.5}}}',
        content().replace('"format": 2', '"format": 1'),
        content().replace('"format": 2', '"format": 3'),
        content().replace('"ONE"', '"TWO"'),
        content(state="absent"),
        content(state=1),
        content(reason=None),
        content(ratio="fast"),
        content(ratio=[1]),
        content(more=1),
        "\udcff",
    ],
)
def test_a_damaged_or_foreign_file_is_one_line_of_log_and_is_replaced(tmp_path, caplog, text) -> None:
    file = DecisionFile(tmp_path / "k.json")
    file.path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert file.read() == {}
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{file.path}: not a file of kernel decisions (")
    file.add({"a": A})
    assert file.read() == {"a": A}


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, caplog) -> None:
    file = DecisionFile(tmp_path / "k.json")
    file.add({"a": A})

    def full(path, *_args, **_options):
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        file.add({"b": B})
    assert file.read() == {"a": A}
    assert [record.getMessage() for record in caplog.records] == [
        f"{file.path}: cannot be written (No space left on device); kernels are tried at each start"
    ]
    assert sorted(os.listdir(tmp_path)) == ["k.json", "k.lock"]


def test_the_oldest_go_first(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(decisions, "MAX_DECISIONS", 3)
    file = DecisionFile(tmp_path / "k.json")
    for key in "abc":
        file.add({key: A})
    file.add({"a": B})  # the newest now
    file.add({"d": B})
    assert file.read() == {"c": A, "a": B, "d": B}


def test_two_processes_at_once_lose_nothing(tmp_path) -> None:
    script = (
        "import sys; from pathlib import Path; from mlx_llama3.autotune.decisions import Decision, DecisionFile\n"
        "from mlx_llama3.model.kernels.kernel_set import Rows\n"
        "used = {Rows.ONE: Decision('used', 'x', 0.5)}\n"
        "for i in range(40): DecisionFile(Path(sys.argv[1])).add({sys.argv[2] + str(i): used})"
    )
    path = tmp_path / "k.json"
    workers = [subprocess.Popen([sys.executable, "-c", script, str(path), name]) for name in "ab"]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    assert set(DecisionFile(path).read()) == {f"{name}{i}" for name in "ab" for i in range(40)}
