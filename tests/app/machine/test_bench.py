"""`mlx-llama3 bench`: the alternation, the figures made of readings, the table, and one small run of the command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import ARGS

from app import cli
from app.machine import bench, bench_worker
from app.machine.bench import lines, summary
from app.machine.bench_worker import KERNELS, OURS, REFERENCES, THEIRS
from app.machine.copy_speed import copy_speed
from app.machine.machine import Machine
from mlx_llama3 import api
from mlx_llama3.checkpoint.folder import Checkpoint
from mlx_llama3.errors import UserError
from mlx_llama3.model.kernels.kernel_set import FUSED, REFERENCE
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx

MAC = Machine("Apple M2 Pro", 16 * 10**9, 11 * 10**9, 200, "macOS 15", "3.12", "0.1.0", "0.32", "0.32.2", True)
REQUEST = {"name": "tiny", "prompt": 100, "tokens": 20, "rounds": 2}


def readings(*decode: float) -> list[dict[str, float]]:
    return [{"prefill": 10 * each, "decode": each} for each in decode]


def results() -> dict[str, list[dict]]:
    """Two rounds; the machine is half as fast in the second one."""
    ours = {
        "weights": {KERNELS: 10**9, REFERENCES: 10**9},
        "cache": 10**6,
        "matrices": "4bit",
        "kernels": {"rope_qkv": "1 row", "swiglu_qmv": "none"},
    }
    first = ours | {"readings": {KERNELS: readings(120, 120), REFERENCES: readings(100, 100)}}
    second = ours | {"readings": {KERNELS: readings(59, 61), REFERENCES: readings(50, 50)}}
    theirs = [{"weights": {THEIRS: 10**9}, "readings": {THEIRS: readings(each, each)}} for each in (80, 40)]
    return {OURS: [first, second], THEIRS: theirs}


def test_medians_bandwidth_and_ratios() -> None:
    report = summary(results(), MAC, REQUEST, None)
    kernels = report["ways"][KERNELS]
    assert (kernels["decode"], kernels["prefill"]) == (90, 900)
    # 1 GB of weights and 110 positions of 1 MB in the cache, 90 times per second, of 200 GB/s.
    assert kernels["GB/s"] == pytest.approx(1.11 * 90)
    assert kernels["share"] == pytest.approx(1.11 * 90 / 200)
    assert [each["decode"] for each in kernels["readings"]] == [120, 120, 59, 61]
    assert report["ratios"] == {
        "kernels / references": {"prefill": pytest.approx(1.2), "decode": pytest.approx(1.2)},
        "kernels / mlx-lm": {"prefill": pytest.approx(1.5), "decode": pytest.approx(1.5)},
    }
    json.dumps(report)


def test_the_table() -> None:
    shown = list(lines(summary(results(), MAC, REQUEST, None)))
    assert shown[0] == "tiny on Apple M2 Pro: 100 tokens read, 20 written, tokens/s"
    assert shown[1].split() == ["read", "written", "GB/s", "of", "200", "GB/s"]
    assert shown[2].split() == ["kernels", "900.0", "90.0", "99.9", "50%"]
    assert shown[4].split()[:3] == ["mlx-lm", "0.32.2", "600.0"]
    assert shown[5].split() == ["kernels", "/", "references", "1.20", "1.20"]
    assert shown[-1] == "Fused kernels: rope_qkv at 1 row."
    assert not any("plain copy" in line or "No fused kernel" in line for line in shown)


def test_a_chip_without_a_specification_is_measured_against_a_copy() -> None:
    machine = Machine(**{**MAC.__dict__, "chip": "Apple M99", "bandwidth": None})
    report = summary(results(), machine, REQUEST, 333.0)
    assert report["ways"][KERNELS]["share"] == pytest.approx(1.11 * 90 / 333)
    assert "333 GB/s is what a plain copy moves here: no specification of this chip is known." in list(lines(report))


def test_without_kernels_it_is_one_way_and_says_where_to_look() -> None:
    alone = {"weights": {OURS: 10**9}, "cache": 0, "matrices": "", "kernels": {}, "readings": {OURS: readings(9, 9)}}
    shown = list(lines(summary({OURS: [alone]}, MAC, REQUEST | {"rounds": 1}, None)))
    assert shown[2].split()[:3] == ["mlx-llama3", "90.0", "9.0"]
    assert "`mlx-llama3 doctor` says why" in shown[-1]


@pytest.mark.parametrize(
    ("ways", "reverse", "turns"), [("ab", False, "abba"), ("ab", True, "baab"), ("a", False, "aa"), ("a", True, "aa")]
)
def test_turns_have_no_favourite(ways, reverse, turns) -> None:
    assert bench_worker._turns(list(ways), reverse) == list(turns)


@pytest.fixture
def tiny(monkeypatch, tmp_path) -> Transformer:
    class Tokenizer:
        stop_ids, special_tokens = frozenset({7}), {}

        def detokenizer(self):
            return self

        def add(self, token: int) -> str:
            return ""

        finish = str

    model = Transformer(ARGS)
    monkeypatch.setattr(api, "load_folder", lambda folder: (model, Tokenizer()))
    return model


def test_kernels_and_references_take_turns_in_one_model(tiny, tmp_path, monkeypatch) -> None:
    used = []
    tiny.kernels = FUSED  # as on a Mac, where they can run

    def use(kernels) -> None:
        used.append(kernels)
        tiny.kernels = REFERENCE

    monkeypatch.setattr(tiny, "use", use, raising=False)
    result = bench_worker.ours(tmp_path, 16, 4, True)
    assert used == [REFERENCE, FUSED, FUSED, REFERENCE]
    assert {variant: len(readings) for variant, readings in result["readings"].items()} == {KERNELS: 2, REFERENCES: 2}
    assert all(each["prefill"] > 0 and each["decode"] > 0 for each in result["readings"][KERNELS])
    # All but the untied embedding, of which a token reads one row.
    assert result["weights"][KERNELS] == 4 * (320 * 64 + 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 128) + 64)
    assert result["cache"] == 2 * 3 * 2 * 16 * 4


def test_what_does_not_fit_is_refused(tiny, tmp_path) -> None:
    with pytest.raises(UserError, match="^--prompt 500 and --tokens 12 do not fit into the model's context of 512$"):
        bench_worker.ours(tmp_path, 500, 12, False)


def done(code: int, out: str = "", err: str = "") -> subprocess.CompletedProcess:
    return subprocess.CompletedProcess([], code, out, err)


def test_mlx_lm_that_fails_is_left_out(monkeypatch, capsys) -> None:
    engines = []

    def run(command, **_):
        engines.append(command[4])
        return done(0, '{"x": 1}\n') if command[4] == OURS else done(1, "", "Traceback\nValueError: not known\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert bench._rounds([OURS, THEIRS], "folder", 8, 2, 3) == {OURS: [{"x": 1}] * 3}
    assert engines == [OURS, THEIRS, OURS, OURS]
    assert capsys.readouterr().err == "mlx-lm is left out, it failed: ValueError: not known\n"


def test_engines_take_turns(monkeypatch) -> None:
    runs = []
    monkeypatch.setattr(bench, "_work", lambda engine, arguments: runs.append((engine, arguments[-1])) or {})
    bench._rounds([OURS, THEIRS], "folder", 8, 2, 2)
    assert runs == [(OURS, "0"), (THEIRS, "0"), (THEIRS, "1"), (OURS, "1")]


def test_faults_of_a_worker(monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done(2, "", "warning\nthe file is broken\n"))
    with pytest.raises(UserError, match="^the file is broken$"):
        bench._work(OURS, [])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done(1, "", "Traceback\nKeyError: 1\n"))
    with pytest.raises(RuntimeError, match="KeyError: 1"):
        bench._work(OURS, [])


def test_a_copy_moves_something() -> None:
    assert 0.1 < copy_speed() < 10_000


def test_the_real_command(demo_folder, tmp_path) -> None:
    file = tmp_path / "bench.json"
    words = ["--prompt", "8", "--tokens", "2", "--rounds", "1", "--no-mlx-lm", "--json", str(file)]
    command = [sys.executable, "-m", "app.cli", "bench", "--model", str(demo_folder), *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(demo_folder.name)
    report = json.loads(file.read_text(encoding="utf-8"))
    variant = report["ways"].get(KERNELS) or report["ways"][OURS]
    assert len(variant["readings"]) == 2 and variant["decode"] > 0
    # The demo model's head is tied to its embedding, so all weights count: packed, and on the CPU as float32.
    on_cpu = mx.default_device() == mx.cpu
    weights = 134_515_008 * 4 if on_cpu else Checkpoint(demo_folder).nbytes
    cache = 9 * 30 * 2 * 3 * 64 * (4 if on_cpu else 2)
    assert variant["GB/s"] / variant["decode"] * 1e9 == pytest.approx(weights + cache)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--rounds", "0"], "argument --rounds: 0 is less than 1"),
        (["--model", "./missing"], "./missing: there is no such folder"),
    ],
)
def test_bad_input(words, complaint, capsys) -> None:
    assert cli.main(["bench", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {complaint}")


def test_a_place_for_the_file_is_looked_for_before_anything_is_measured(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench, "_rounds", lambda *_: pytest.fail("it was measured"))
    assert cli.main(["bench", "--json", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} is a folder; name a file\n"
    assert cli.main(["bench", "--json", str(tmp_path / "no" / "b.json")]) == 2
    assert f"b.json: there is no folder {tmp_path / 'no'}; make it" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path) -> None:
    with pytest.raises(UserError, match=r"no/b.json: cannot be written: No such file or directory$"):
        bench._write(tmp_path / "no" / "b.json", {})


def test_readings_are_neither_lost_with_their_file_nor_with_their_reader(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench, "find_model", lambda name: ("tiny", tmp_path))
    monkeypatch.setattr(bench, "_rounds", lambda *_: {})
    monkeypatch.setattr(bench, "summary", lambda *_: {"read": 1.0})
    monkeypatch.setattr(bench, "lines", lambda report: ["the table"])
    if Path("/dev/full").exists():
        assert cli.main(["bench", "--json", "/dev/full"]) == 2
        shown = capsys.readouterr()
        assert shown.out == "the table\n" and "/dev/full: cannot be written: No space left on device" in shown.err

    def left(report):
        raise BrokenPipeError

    monkeypatch.setattr(bench, "lines", left)
    with pytest.raises(BrokenPipeError):
        bench.bench(cli.build_parser("bench").parse_args(["bench", "--json", str(tmp_path / "b.json")]))
    assert json.loads((tmp_path / "b.json").read_text()) == {"read": 1.0}
