"""The choice of kernels, without Metal: which are used, what is logged and stored, and `MLX_LLAMA3_KERNELS`."""

import logging
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from stand_in_device import StandIn
from tiny_models import ARGS

from mlx_llama3.autotune import choice
from mlx_llama3.autotune.choice import NAMES, choose, use_chosen
from mlx_llama3.autotune.decisions import ByRows, Decision, DecisionFile
from mlx_llama3.autotune.trial import Case
from mlx_llama3.errors import UserError
from mlx_llama3.model.kernels.kernel_set import REFERENCE, Kernels, Rows
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx


def raising(x: mx.array) -> mx.array:
    raise RuntimeError("Unable to build metal library\nprogram_source:3:1: error: unknown type name 'floaat4'")


def only(by_rows: ByRows) -> Decision:
    """The decision on a kernel that was tried at one row, or that has one for all."""
    (decision,) = by_rows.values()
    return decision


def four(device: StandIn) -> dict:
    """One kernel that is good, and three that are wrong, slow or broken."""
    return {
        "add_rms_norm": [device.case("add_rms_norm")],
        "rope_qkv": [device.case("rope_qkv", fused=lambda x: 3 * x)],
        "swiglu_qmv": [device.case("swiglu_qmv", seconds=2e-5)],
        "sdpa_quantized": [device.case("sdpa_quantized", fused=raising)],
    }


def test_the_reference_is_used_where_a_kernel_is_wrong_slow_or_broken(tmp_path, caplog) -> None:
    device = StandIn(noise=0.02)
    with caplog.at_level(logging.INFO):
        chosen = choose(four(device), DecisionFile(tmp_path / "k.json"), "M9", device=device)
    assert chosen.kernels == Kernels(add_rms_norm=Rows.ONE)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["INFO", "WARNING", "WARNING", "WARNING"]
    messages = [message for _, message in lines]
    assert messages[0].startswith("kernel add_rms_norm: used (one token: 0.5")
    assert messages[1].startswith("kernel rope_qkv: failed (one token: output 0 differs by 0.5 at most")
    assert messages[2].startswith("kernel swiglu_qmv: slower (one token: 2.0")
    assert messages[3].startswith("kernel sdpa_quantized: failed (one token: RuntimeError: program_source:3:1: error: ")
    assert not any("\n" in message for message in messages)


def test_a_kernel_that_gives_nan_is_not_used(tmp_path) -> None:
    device = StandIn()
    cases = {"rope_qkv": [device.case(fused=lambda x: x * mx.nan)]}
    chosen = choose(cases, DecisionFile(tmp_path / "k.json"), "M9", device=device)
    assert chosen.kernels == REFERENCE
    assert chosen.decisions["rope_qkv"] == {Rows.ALL: Decision("failed", "one token: output 0 holds NaN or infinity")}


def test_a_second_start_tries_nothing_and_says_nothing(tmp_path, caplog) -> None:
    device, file = StandIn(noise=0.02), DecisionFile(tmp_path / "k.json")
    first = choose(four(device), file, "M9", device=device)
    caplog.clear()
    again = StandIn()
    second = choose(four(again), DecisionFile(file.path), "M9", device=again)
    assert second == first
    assert again.runs == 0
    assert not caplog.records


@pytest.mark.parametrize("fault", ["slower", "failed"])
def test_kernels_that_are_slower_or_wrong_together_are_not_used(tmp_path, caplog, fault) -> None:
    device, file = StandIn(), DecisionFile(tmp_path / "k.json")
    tried = []

    def whole_step(kernels: Kernels):
        tried.append(kernels)
        return device.case("all", seconds=2e-5, fused=None if fault == "slower" else raising, label="the model's step")

    cases = {
        "add_rms_norm": [device.case("a")],
        "rope_qkv": [device.case("b")],
        "sdpa_quantized": [device.case("c")],
        "swiglu_qmv": [device.case("d", seconds=2e-5)],
        "double_buffer": [device.case("e")],
    }
    chosen = choose(cases, file, "M9", whole_step=whole_step, device=device)
    assert tried == [Kernels(add_rms_norm=Rows.ONE, rope_qkv=Rows.ONE)]
    assert chosen.kernels == Kernels(sdpa_quantized=Rows.ONE, double_buffer=Rows.ONE)  # not part of the step
    assert [only(by_rows).state for by_rows in chosen.decisions.values()] == [fault, fault, "used", "slower", "used"]
    assert only(chosen.decisions["rope_qkv"]).reason.startswith("all together: the model's step: ")
    assert caplog.records[-1].getMessage().startswith(f"all kernels together: {fault} (the model's step: ")
    before = device.runs
    assert choose(cases, DecisionFile(file.path), "M9", whole_step=whole_step, device=device) == chosen
    assert device.runs == before


def cases_by_rows(device: StandIn, kernel: str, **seconds: float) -> list[Case]:
    """Cases of a kernel at several numbers of rows; its reference takes 1e-5 seconds."""
    return [replace(device.case(kernel, seconds=each, label=rows), rows=Rows[rows]) for rows, each in seconds.items()]


def test_a_kernel_serves_at_the_rows_where_it_is_faster(tmp_path, caplog) -> None:
    device, file = StandIn(noise=0.02), DecisionFile(tmp_path / "k.json")
    cases = {
        "swiglu_qmv": cases_by_rows(device, "swiglu_qmv", ONE=0.5e-5, FEW=2e-5),
        "rope_qkv": cases_by_rows(device, "rope_qkv", ONE=2e-5, FEW=0.5e-5, MANY=0.6e-5),
    }
    chosen = choose(cases, file, "M9", whole_step=lambda _: device.case("all"), device=device)
    assert chosen.kernels == Kernels(swiglu_qmv=Rows.ONE, rope_qkv=Rows.FEW | Rows.MANY)
    assert [(rows, each.state) for rows, each in chosen.decisions["swiglu_qmv"].items()] == [
        (Rows.ONE, "used"),
        (Rows.FEW, "slower"),
    ]
    assert [record.levelname for record in caplog.records if "swiglu_qmv" in record.getMessage()] == ["WARNING"]
    again = StandIn()
    stored = choose(cases, DecisionFile(file.path), "M9", whole_step=lambda _: again.case("all"), device=again)
    assert stored == chosen and again.runs == 0


def test_a_kernel_that_is_wrong_at_some_rows_is_used_at_none(tmp_path) -> None:
    device = StandIn()
    fast, wrong = cases_by_rows(device, "swiglu_qmv", ONE=0.5e-5, FEW=0.5e-5)
    cases = {"swiglu_qmv": [fast, replace(wrong, fused=lambda x: [3 * x])]}
    chosen = choose(cases, DecisionFile(tmp_path / "k.json"), "M9", device=device)
    assert chosen.kernels == REFERENCE
    assert only(chosen.decisions["swiglu_qmv"]).reason.startswith("FEW: output 0 differs")


def test_a_kernel_is_compared_with_the_kernels_whose_work_it_does_where_these_are_used(tmp_path) -> None:
    """It is faster than plain operations, and slower than two kernels; one of these is used at one row only."""
    device = StandIn()
    norm = cases_by_rows(device, "norm_swiglu_qmv", ONE=0.9e-5, FEW=0.9e-5)
    beside = cases_by_rows(device, "norm_swiglu_qmv", ONE=2e-5, FEW=2e-5)
    cases = {
        "add_rms_norm": cases_by_rows(device, "add_rms_norm", ONE=0.5e-5, FEW=0.5e-5),
        "swiglu_qmv": cases_by_rows(device, "swiglu_qmv", ONE=0.5e-5, FEW=2e-5),
        "norm_swiglu_qmv": [*norm, *(replace(case, beside=("add_rms_norm", "swiglu_qmv")) for case in beside)],
    }
    chosen = choose(cases, DecisionFile(tmp_path / "k.json"), "M9", device=device)
    assert chosen.kernels.swiglu_qmv == Rows.ONE
    assert chosen.kernels.norm_swiglu_qmv == Rows.FEW


@pytest.mark.parametrize(("fault", "left"), [("slower", Rows.FEW), ("failed", Rows.NONE)])
def test_the_whole_step_decides_for_one_row_and_a_wrong_one_for_all(tmp_path, fault, left) -> None:
    device = StandIn()

    def whole_step(kernels: Kernels) -> Case:
        return device.case("all", seconds=2e-5, fused=None if fault == "slower" else raising)

    cases = {
        "rope_qkv": cases_by_rows(device, "rope_qkv", ONE=0.5e-5, FEW=0.5e-5),
        "swiglu_qmv": cases_by_rows(device, "swiglu_qmv", ONE=2e-5, FEW=0.5e-5),
    }
    chosen = choose(cases, DecisionFile(tmp_path / "k.json"), "M9", whole_step=whole_step, device=device)
    assert chosen.kernels == Kernels(rope_qkv=left, swiglu_qmv=Rows.FEW)


def test_nothing_is_tried_together_where_no_kernel_is_used(tmp_path) -> None:
    device = StandIn()
    cases = {"add_rms_norm": [device.case(seconds=2e-5)]}
    choose(cases, DecisionFile(tmp_path / "k.json"), "M9", whole_step=lambda _: pytest.fail("tried"), device=device)


@pytest.mark.parametrize("change", ["machine", "shape", "dtype", "weights"])
def test_another_machine_or_shape_is_tried_anew(tmp_path, change) -> None:
    device, file = StandIn(), DecisionFile(tmp_path / "k.json")
    case = device.case()
    choose({"rope_qkv": [case]}, file, "M9", device=device)
    before = device.runs
    x = case.inputs[0]
    inputs = {"shape": (x[:, :, :32],), "dtype": (x.astype(mx.float16),)}.get(change, case.inputs)
    weights = "4bit" if change == "weights" else ""
    other = type(case)("rope_qkv", "b", inputs, case.fused, case.reference, case.next_inputs, inputs[0].dtype, weights)
    choose({"rope_qkv": [other]}, file, "M10" if change == "machine" else "M9", device=device)
    assert device.runs > before
    assert len(file.read()) == 2


def test_a_kernel_that_crashed_the_process_is_not_tried_again(tmp_path, caplog) -> None:
    script = (
        "import os, sys; from pathlib import Path; from stand_in_device import StandIn\n"
        "from mlx_llama3.autotune.choice import choose; from mlx_llama3.autotune.decisions import DecisionFile\n"
        "device = StandIn(); cases = {'rope_qkv': [device.case(fused=lambda x: os._exit(9))]}\n"
        "choose(cases, DecisionFile(Path(sys.argv[1])), 'M9', device=device)"
    )
    path = tmp_path / "k.json"
    support = str(Path(__file__).parents[2] / "support")
    environment = os.environ | {"PYTHONPATH": support}
    assert subprocess.run([sys.executable, "-c", script, str(path)], env=environment, timeout=60).returncode == 9
    device = StandIn()
    cases = {"rope_qkv": [device.case(fused=lambda x: pytest.fail("it was tried"))]}
    for start in (1, 2):
        chosen = choose(cases, DecisionFile(path), "M9", device=device)
        assert chosen.kernels == REFERENCE
        assert only(chosen.decisions["rope_qkv"]).reason.startswith("the program ended while it was tried; ")
        assert str(path) in only(chosen.decisions["rope_qkv"]).reason
        assert len(caplog.messages) == start and caplog.messages[-1].startswith("kernel rope_qkv: failed (the program")


def test_a_trial_waits_for_that_of_another_process(tmp_path, caplog) -> None:
    script = (
        "import sys; from pathlib import Path; from stand_in_device import StandIn\n"
        "from mlx_llama3.autotune.choice import choose; from mlx_llama3.autotune.decisions import DecisionFile\n"
        "def fused(x):\n"
        "    if not sys.stdin.closed: print('trying', flush=True); sys.stdin.readline(); sys.stdin.close()\n"
        "    return 2 * x\n"
        "device = StandIn(); cases = {'rope_qkv': [device.case(fused=fused)]}\n"
        "choose(cases, DecisionFile(Path(sys.argv[1])), 'M9', device=device)"
    )
    path = tmp_path / "k.json"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "support")}
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as other:

        class Watched(DecisionFile):
            def read(self) -> dict[str, ByRows]:
                """Read the unfinished decision of the other process, and then let that process continue."""
                decisions = super().read()
                if not other.stdin.closed:
                    assert [only(by_rows).state for by_rows in decisions.values()] == ["failed"]
                    other.stdin.close()
                return decisions

        assert other.stdout.readline() == "trying\n"
        device = StandIn()
        cases = {"rope_qkv": [device.case(fused=lambda x: pytest.fail("it was tried"))]}
        chosen = choose(cases, Watched(path), "M9", device=device)
    assert chosen.kernels == Kernels(rope_qkv=Rows.ONE)
    assert not caplog.records


def test_a_trial_that_hangs_in_another_process_is_waited_for_once(tmp_path, monkeypatch, caplog) -> None:
    path = tmp_path / "k.json"
    device, waits = StandIn(), []

    @contextmanager
    def held(path: Path, *, seconds: float):
        waits.append((path.name, seconds))
        raise TimeoutError
        yield

    monkeypatch.setattr("mlx_llama3.autotune.decisions.WAIT_SECONDS", 7.0)
    with monkeypatch.context() as patch:
        patch.setattr("mlx_llama3.autotune.decisions.exclusive", held)
        chosen = choose(four(device), DecisionFile(path), "M9", whole_step=lambda _: device.case("all"), device=device)
    assert chosen.kernels == REFERENCE and device.runs == 0 and not path.exists()
    assert waits == [("k.trying", 7.0)] + 3 * [("k.trying", 0.0)]
    busy = "another program has been trying kernels for 7 seconds; if it hangs, end it"
    assert set(chosen.decisions) == set(four(device))
    assert {only(by_rows) for by_rows in chosen.decisions.values()} == {Decision("absent", busy)}
    assert caplog.messages == [f"{path}: {busy}. Until then kernels that were not tried are not used"]


def test_ctrl_c_says_nothing_about_a_kernel(tmp_path) -> None:
    def interrupted(x: mx.array) -> mx.array:
        raise KeyboardInterrupt

    device, file = StandIn(), DecisionFile(tmp_path / "k.json")
    cases = {"add_rms_norm": [device.case("a")], "rope_qkv": [device.case("b", fused=interrupted)]}
    with pytest.raises(KeyboardInterrupt):
        choose(cases, file, "M9", device=device)
    assert [only(by_rows).state for by_rows in file.read().values()] == ["used"]  # the earlier decision stays


def test_without_a_use_there_is_nothing_to_try(tmp_path) -> None:
    chosen = choose({"sdpa_quantized": []}, DecisionFile(tmp_path / "k.json"), "M9", device=StandIn())
    assert only(chosen.decisions["sdpa_quantized"]).state == "absent"
    assert chosen.kernels == REFERENCE
    assert not (tmp_path / "k.json").exists()


@pytest.mark.parametrize("obstacle", ["damaged", "folder", "no folder"])
def test_a_file_that_cannot_be_used_changes_nothing_but_the_log(tmp_path, caplog, obstacle) -> None:
    path = tmp_path / "k.json"
    if obstacle == "damaged":
        path.write_text('{"format": 1, "decisions')
    elif obstacle == "folder":
        path.mkdir()
    else:
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "k.json"
    device = StandIn()
    chosen = choose({"add_rms_norm": [device.case()]}, DecisionFile(path), "M9", device=device)
    assert chosen.kernels == Kernels(add_rms_norm=Rows.ONE)
    assert len(caplog.records) == (1 if obstacle == "damaged" else 2)  # read, and written
    assert all(str(path) in record.getMessage() for record in caplog.records)


def test_on_the_cpu_the_references_are_used_without_a_trial(monkeypatch) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(choice, "has_metal", lambda: False)
    model = Transformer(ARGS)
    chosen = use_chosen(model)
    assert model.kernels == REFERENCE
    assert set(chosen.decisions) == set(NAMES)
    assert list(chosen.decisions.values()) == len(NAMES) * [{Rows.ALL: Decision("absent", "there is no Metal here")}]


def test_reference_on_a_mac_tries_nothing(monkeypatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "reference")
    monkeypatch.setattr(choice, "has_metal", lambda: True)
    monkeypatch.setattr(choice, "choose", lambda *_, **__: pytest.fail("it was tried"))
    model = Transformer(ARGS)
    assert use_chosen(model).decisions["rope_qkv"] == {Rows.ALL: Decision("absent", "MLX_LLAMA3_KERNELS is reference")}
    assert model.kernels == REFERENCE


def test_fused_is_taken_untried_on_a_mac_and_refused_elsewhere(monkeypatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "fused")
    monkeypatch.setattr(choice, "has_metal", lambda: False)
    model = Transformer(ARGS)
    with pytest.raises(UserError, match="^MLX_LLAMA3_KERNELS is fused, but the kernels need Metal"):
        use_chosen(model)
    assert model.kernels == REFERENCE
    monkeypatch.setattr(choice, "has_metal", lambda: True)
    monkeypatch.setattr(choice, "choose", lambda *_, **__: pytest.fail("it was tried"))
    assert {only(by_rows).state for by_rows in use_chosen(model).decisions.values()} == {"used"}
    assert model.kernels.rope_qkv == model.layers[0].attention.fused == Rows.ALL


def test_auto_on_a_mac_uses_the_kernels_that_passed(monkeypatch, tmp_path) -> None:
    device = StandIn(noise=0.02)
    monkeypatch.setenv(choice.VARIABLE, "auto")
    monkeypatch.setenv("MLX_LLAMA3_CACHE", str(tmp_path))
    monkeypatch.setattr(choice, "has_metal", lambda: True)
    monkeypatch.setattr("mlx_llama3.autotune.cases.model_cases", lambda model: four(device))
    monkeypatch.setattr("mlx_llama3.autotune.whole_step.step_case", lambda model, kernels: device.case("all"))
    monkeypatch.setattr(choice, "Device", lambda: device)
    model = Transformer(ARGS)
    use_chosen(model)
    assert model.kernels == Kernels(add_rms_norm=Rows.ONE)
    key = next(iter(DecisionFile(tmp_path / "kernels.json").read()))
    assert mx.device_info()["device_name"] in key and f"MLX {mx.__version__}" in key and choice.sources_hash() in key


@pytest.mark.parametrize("changed", ["kernels/rope_qkv.py", "cache/double_buffered.py", "autotune/trial.py"])
def test_what_has_changed_is_tried_again(monkeypatch, changed) -> None:
    read = Path.read_bytes
    before = choice.sources_hash.__wrapped__()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * path.as_posix().endswith(changed))
    assert choice.sources_hash.__wrapped__() != before


@pytest.mark.parametrize("value", ["fast", "FUSED", "0", "reference,fused"])
def test_an_unknown_mode_is_an_error_of_one_line(monkeypatch, value) -> None:
    monkeypatch.setenv(choice.VARIABLE, value)
    with pytest.raises(UserError) as raised:
        use_chosen(Transformer(ARGS))
    assert str(raised.value) == f"MLX_LLAMA3_KERNELS is '{value}'; it must be one of auto, reference, fused"
