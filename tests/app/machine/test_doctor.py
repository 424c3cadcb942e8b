"""`mlx-llama3 doctor`: the report on a machine and a model, as text and as JSON."""

import json

import pytest
from tiny_models import ARGS, tiny_args

from app import cli
from app.machine import doctor
from app.options.model import OpenModel
from mlx_llama3.autotune.choice import KernelChoice
from mlx_llama3.autotune.decisions import Decision
from mlx_llama3.errors import UserError
from mlx_llama3.model.kernels.kernel_set import NAMES, Rows
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command with a tiny model; returns (code, output, errors)."""
    monkeypatch.delenv("MLX_LLAMA3_KERNELS", raising=False)
    opened = OpenModel("tiny", Transformer(ARGS), None)
    monkeypatch.setattr(doctor, "open_model", lambda name: opened)

    def run(*words: str) -> tuple[int, str, str]:
        return cli.main(["doctor", *words]), *capsys.readouterr()

    return run


def test_the_report_is_true(run) -> None:
    code, out, err = run("--model", "tiny", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert list(report) == ["machine", "matrices", "model", "error", "kernels", "dispatches"]
    assert report["machine"]["mlx"] == mx.__version__
    assert report["machine"]["memory"] >= report["machine"]["available"] > 10**8
    model = report["model"]
    # Embedding and head; per layer four matrices of attention, three of the feed-forward and two norms; the final norm.
    weights = 2 * 320 * 64 + 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64) + 64
    assert (model["name"], model["weights"], model["dtype"]) == ("tiny", 4 * weights, "float32")
    plain = model["caches"][0]
    assert plain == {
        "kv_bits": None,
        "bytes a token": 2 * 3 * 2 * 16 * 4,
        "full context": 512 * 2 * 3 * 2 * 16 * 4,
        "fits": 512,
    }
    assert [cache["kv_bits"] for cache in model["caches"]] == [None, 8, 4]
    assert "heads" in model["caches"][1]["error"]  # heads of 16 are too narrow for a quantized cache


def test_a_cache_in_fewer_bits_holds_more(run, monkeypatch) -> None:
    args = tiny_args(head_dim=64, max_seq_len=100_000)
    monkeypatch.setattr(doctor, "open_model", lambda name: OpenModel("tiny", Transformer(args), None))
    plain_token, room = 2 * 3 * 2 * 64 * 4, 10_000
    monkeypatch.setattr(doctor, "free_memory", lambda: room * plain_token)
    plain, eight, four = json.loads(run("-m", "tiny", "--json")[1])["model"]["caches"]
    assert (plain["bytes a token"], plain["fits"]) == (plain_token, room)
    assert eight["fits"] == room * plain_token // eight["bytes a token"] > 3 * room  # float32 here
    assert four["fits"] > eight["fits"] and four["full context"] < eight["full context"] < plain["full context"]


def test_the_text(run, monkeypatch) -> None:
    monkeypatch.setenv("MLX_LLAMA3_KERNELS", "reference")  # what a trial says may be longer than a line
    code, out, err = run("-m", "tiny")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("mlx-llama3 0.1.0, MLX ")
    assert "model     tiny: 3 layers of width 64, computed in float32" in lines
    assert any(line.split() == ["full", "precision", "0.8", "kB", "0.00", "GB", "all"] for line in lines)
    assert max(map(len, lines)) <= 120
    assert "mlx-llama3 doctor --json" in lines[-2]


@pytest.mark.skipif(mx.metal.is_available(), reason="there is Metal here")
def test_without_metal_it_says_so(run) -> None:
    _, out, _ = run("-m", "tiny")
    assert "computes  on the CPU: no Metal here" in out
    assert out.count("not used  there is no Metal here") == len(NAMES)


def test_the_kernels_of_a_mac(run, monkeypatch) -> None:
    decisions = {
        "add_rms_norm": {Rows.ONE: Decision("used", "one token: 0.71 of the reference's time (±0.01)", 0.71)},
        "rope_qkv": {
            Rows.ONE: Decision("slower", "one token: 1.20 of the reference's time (±0.01)", 1.2),
            Rows.FEW: Decision("used", "a draft of 3 tokens: 0.90 of the reference's time (±0.01)", 0.9),
        },
        "swiglu_qmv": {Rows.ALL: Decision("failed", "one token: output 0 holds NaN or infinity")},
        "sdpa_quantized": {Rows.ALL: Decision("absent", "it does not take the shapes or types of this model")},
        "norm_rope_qkv": {Rows.FEW: Decision("used", "a draft of 3 tokens: 0.90 of the reference's time (±0.01)", 0.9)},
        "norm_swiglu_qmv": {Rows.ONE: Decision("slower", "one token: 1.10 of the reference's time (±0.01)", 1.1)},
        "double_buffer": {Rows.ONE: Decision("slower", "not faster; 4 tokens after 2044: 1.00")},
    }
    monkeypatch.setattr(doctor, "use_chosen", lambda model: KernelChoice.of(decisions))
    _, out, _ = run("-m", "tiny")
    lines = out.splitlines()
    assert "  add_rms_norm    1 row         used      one token: 0.71 of the reference's time (±0.01)" in lines
    at = lines.index("  rope_qkv        1 row         slower    one token: 1.20 of the reference's time (±0.01)")
    few = "                  2 to 8 rows   used      a draft of 3 tokens: 0.90 of the reference's time (±0.01)"
    assert lines[at + 1] == few
    assert "  swiglu_qmv      all rows      failed    one token: output 0 holds NaN or infinity" in lines
    report = json.loads(run("-m", "tiny", "--json")[1])
    assert list(report["kernels"]["rope_qkv"]) == ["1 row", "2 to 8 rows"]
    reason = decisions["rope_qkv"][Rows.ONE].reason
    assert report["kernels"]["rope_qkv"]["1 row"] == {"state": "slower", "reason": reason, "ratio": 1.2}
    sums = {column: sum(row[column] for row in report["dispatches"]) for column in ("references", "kernels", "in use")}
    assert sums["kernels"] <= 10  # the limit that the project promises
    assert sums["kernels"] < sums["in use"] == sums["references"] - 2  # two adds are part of two norms


def test_without_a_model_the_rest_is_shown(run, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(doctor, "demo_folder", lambda: tmp_path / "never made")
    monkeypatch.setattr(doctor, "open_model", lambda name: pytest.fail(f"{name} was opened"))
    code, out, _ = run()
    assert code == 0
    assert "model     none was examined: the demo model was never fetched; name another one with --model" in out
    assert "dispatches of a layer" in out
    assert json.loads(run("--json")[1])["model"] is None


def test_the_demo_model_is_looked_at_if_it_is_there(run, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(doctor, "demo_folder", lambda: tmp_path)
    assert json.loads(run("--json")[1])["model"]["name"] == "tiny"


def test_a_model_that_does_not_load_is_part_of_the_report(run, monkeypatch) -> None:
    def broken(name: str) -> OpenModel:
        raise UserError(f"{name}: tensor model.norm.weight holds NaN or infinity")

    monkeypatch.setattr(doctor, "open_model", broken)
    code, out, err = run("-m", "x")
    assert (code, err) == (2, "")
    assert "none was examined: x: tensor model.norm.weight holds NaN or infinity" in out
    code, out, _ = run("-m", "x", "--json")
    assert code == 2 and json.loads(out)["error"].startswith("x: tensor")


def test_a_wrong_variable_is_an_error_of_one_line(run, monkeypatch) -> None:
    monkeypatch.setenv("MLX_LLAMA3_KERNELS", "quick")
    code, out, err = run("-m", "tiny")
    assert (code, out) == (2, "")
    assert err == "error: MLX_LLAMA3_KERNELS is 'quick'; it must be one of auto, reference, fused\n"
