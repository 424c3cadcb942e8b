"""The side-by-side benchmark: summaries, tables, plans and failing workers."""

import pytest

from benchmarks import side_by_side
from benchmarks.side_by_side import PACKAGES, summary, table


def reading(load: float, prefill: dict[int, float], decode: float) -> dict:
    return {"load": load, "first": 2 * load, "peak": 3e6 * load, "prefill": prefill, "decode": {64: decode}}


READINGS = {
    "mlx-llama3": [reading(1, {64: 100, 512: 80}, 20), reading(9, {64: 300, 512: 80}, 30), reading(2, {64: 200}, 25)],
    "mlx-lm": [reading(4, {64: 10}, 5)],
}


def test_medians_of_what_each_engine_measured():
    medians = summary(READINGS)
    ours = {"load": 2, "first": 4, "peak": 6e6, "prefill 64": 200, "prefill 512": 80, "decode 64": 25}
    assert medians["mlx-llama3"] == ours
    assert "prefill 512" not in medians["mlx-lm"]


def test_what_takes_minutes_is_read_once():
    lengths = {
        engine: [side_by_side._plan(engine, False, first=first)["prefill"] for first in (True, False)]
        for engine in PACKAGES
    }
    assert lengths.pop("mlx-lm") == [[64, 512, 2048], [64]]
    assert list(lengths.values()) == [[[64, 512, 2048]] * 2] * 3
    assert side_by_side._plan("mlx-lm", True, first=True)["prefill"] == [64]


def test_ratios_say_how_many_times_as_well_this_project_does():
    lines = {line.split("  ")[0]: line for line in table("a model", summary(READINGS))}
    assert lines["load, s"].endswith("4.00 (2.00x)")
    assert lines["peak memory, MB"].endswith("12 (2.00x)")
    assert lines["prefill 64, tokens/s"].endswith("10.0 (20.00x)")
    assert lines["decode 64, tokens/s"].endswith("5.0 (5.00x)")
    assert lines["prefill 512, tokens/s"].split()[-2:] == ["80.0", "-"]


def test_a_worker_that_fails_ends_the_run_with_its_words(monkeypatch, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    worker = tmp_path / "benchmarks" / "engines.py"
    worker.write_text("import sys; sys.exit('no such model')")
    monkeypatch.setattr(side_by_side, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="mlx-lm failed:\nno such model"):
        side_by_side._worker("mlx-lm", tmp_path, {})


@pytest.mark.parametrize("died", ["SIGSEGV", "SIGILL"])
def test_llama_cpp_is_tried_again_without_matrix_tiles(died, monkeypatch, tmp_path, capsys):
    (tmp_path / "benchmarks").mkdir()
    worker = tmp_path / "benchmarks" / "engines.py"
    worker.write_text(
        "import json, os, signal\n"
        f"if {side_by_side.NO_TILES!r} not in os.environ: os.kill(os.getpid(), signal.{died})\n"
        "print(json.dumps({'load': 1}))\n"
    )
    monkeypatch.setattr(side_by_side, "ROOT", tmp_path)
    monkeypatch.setenv(side_by_side.NO_TILES, "")  # restored afterwards
    monkeypatch.delenv(side_by_side.NO_TILES)
    assert side_by_side._worker("llama.cpp", tmp_path, {}) == {"load": 1}
    assert "without matrix tiles" in capsys.readouterr().err


def test_every_engine_has_a_worker_and_a_package_to_look_for():
    from benchmarks.engines import ENGINES

    assert list(ENGINES) == list(side_by_side.PACKAGES)
