"""The trial cases of a model: they have its shapes, types and weights, and their references are correct."""

import logging
import platform
import sys
from dataclasses import replace

import pytest
from stand_in_device import StandIn
from tiny_models import quantized, random_weights, tiny_args, write_folder

from mlx_llama3.autotune import cases as kernel_cases
from mlx_llama3.autotune.cases import model_cases
from mlx_llama3.autotune.choice import NAMES, choose
from mlx_llama3.autotune.decisions import DecisionFile
from mlx_llama3.autotune.trial import Timing, difference, try_kernel
from mlx_llama3.autotune.whole_step import CONTEXT, step_case
from mlx_llama3.checkpoint import loading
from mlx_llama3.model.kernels import norm_rope_qkv, norm_swiglu_qmv, rope_qkv
from mlx_llama3.model.kernels.kernel_set import FUSED, REFERENCE, Rows
from mlx_llama3.model.transformer import Transformer
from tests.metal_harness.emulator import emulated
from tests.metal_harness.host import unsupported

import mlx.core as mx
from mlx.utils import tree_flatten

METAL = tuple(name for name in NAMES if name != "double_buffer")  # the kernels; a cache runs everywhere
WHY_NOT = unsupported(sys.platform, platform.machine())
in_the_harness = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
ARGS = tiny_args(dim=128, hidden_dim=256, head_dim=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Transformer:
    """A model with weights in 4 bits, but w1 and w3 of the last layer in 8."""
    weights = random_weights(ARGS)
    packed, last = quantized(weights), quantized(weights, bits=8)
    eight = ("mlp.gate_proj", "mlp.up_proj")
    names = [name for name in last if name.startswith("model.layers.2") and any(each in name for each in eight)]
    packed |= {name: last[name] for name in names}
    settings = {"bits": 4, "group_size": 32}
    settings |= {f"model.layers.2.{name}": {"bits": 8, "group_size": 32} for name in eight}
    folder = write_folder(tmp_path_factory.mktemp("model"), ARGS, packed, quantization=settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_fits_expanded", lambda *_: False)  # keep the weights packed, as on a Mac
        return loading.load_model(folder)


def test_cases_are_the_models_own(model) -> None:
    cases = model_cases(model)
    keys = [case.key for each in cases.values() for case in each]
    assert {case.rows for case in cases["rope_qkv"]} == set(Rows)
    assert {case.rows for case in cases["sdpa_quantized"]} == {Rows.ONE, Rows.FEW}
    assert len(set(keys)) == len(keys)
    assert "add_rms_norm(float32[1,1,128],float32[1,1,128],float32[128])" in keys
    assert "rope_qkv(float32[1,257,512])heads(4,2)" in keys
    assert "swiglu_qmv(float32[1,1,128])4bit/32affineuint32[512,16]" in keys
    assert "swiglu_qmv(float32[1,3,128])8bit/32affineuint32[512,32]" in keys
    assert "sdpa_quantized(float32[1,4,3,64],float32[2,1,2,168,64],uint32[1,2,1900,27])" in keys
    norm = "norm_swiglu_qmv(float32[1,1,128],float32[1,1,128],float32[128])4bit/32affineuint32[512,16]"
    assert norm in keys and f"{norm},add_rms_norm,swiglu_qmv" in keys
    norm = "norm_rope_qkv(float32[1,3,128],float32[1,3,128],float32[128])4bit/32affineuint32[512,16]"
    assert norm in keys and f"{norm},add_rms_norm,rope_qkv" in keys
    # The kernel does not support prompts, so there are no cases for them.
    assert {case.inputs[0].shape[1] for case in cases["swiglu_qmv"]} == {1, 3}
    assert {case.inputs[0].shape[1] for case in cases["add_rms_norm"]} == {1, 3, 257}


def test_calls_in_a_row_keep_their_shapes(model) -> None:
    for kernel, cases in model_cases(model).items():
        for case in cases:
            if case.beside:  # their references run kernels
                continue
            inputs = case.inputs
            for _ in range(3):
                inputs = case.next_inputs(inputs, case.reference(*inputs))
            shapes = [each.shape for each in inputs if isinstance(each, mx.array)]
            assert shapes == [each.shape for each in case.inputs if isinstance(each, mx.array)], kernel


def test_calls_in_a_row_take_the_weights_of_one_layer_after_the_other(model) -> None:
    case = next(case for case in model_cases(model)["swiglu_qmv"] if "4bit" in case.key)
    x, _ = case.inputs
    first, second = (layer.feed_forward.w13(x) for layer in model.layers[:2])
    for index, (gate, up) in enumerate((first, second, first)):
        assert mx.allclose(case.reference(x, index)[0], gate * mx.sigmoid(gate) * up, atol=1e-6).item()
    assert case.next_inputs(case.inputs, case.reference(*case.inputs))[1] == 1


def test_products_with_the_norm_take_the_weights_of_one_layer_after_the_other(model) -> None:
    for kernel, reference in (("norm_swiglu_qmv", norm_swiglu_qmv), ("norm_rope_qkv", norm_rope_qkv)):
        case = model_cases(model)[kernel][0]
        stream = case.inputs[:3]
        for index, layer in enumerate(model.layers[:2]):
            matrix, rest = layer.feed_forward.w13, ()
            if kernel == "norm_rope_qkv":
                matrix = layer.attention.wqkv
                freqs = model.rope.frequencies(kernel_cases.CONTEXT, 1, table=False)
                rest = (ARGS.n_heads, ARGS.n_kv_heads, kernel_cases.CONTEXT, freqs)
            expected = reference.reference(*stream, ARGS.norm_eps, matrix, *rest)
            expected = [array for _, array in tree_flatten(expected)]
            for output, wanted in zip(case.reference(*stream, index), expected, strict=True):
                assert mx.allclose(output, wanted, atol=1e-5).item()
        assert case.next_inputs(case.inputs, case.reference(*case.inputs))[3] == 1


def test_unsupported_shapes_are_no_case(tmp_path) -> None:
    cases = model_cases(loading.load_model(write_folder(tmp_path / "small", tiny_args())))
    assert cases["swiglu_qmv"] == []  # dense weights
    assert cases["sdpa_quantized"] == []  # heads of 16
    odd = tiny_args(dim=66, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=2050)
    cases = model_cases(loading.load_model(write_folder(tmp_path / "odd", odd)))
    assert cases["add_rms_norm"] == []  # 66 is no multiple of 4
    assert cases["rope_qkv"] == []  # half a head is more than 1,024 threads


def test_the_step_is_that_of_the_model(model) -> None:
    case = step_case(model, REFERENCE)
    tokens = mx.concatenate([mx.ones((1, CONTEXT), mx.int32), mx.array([[7]])], axis=1)
    expected = model(tokens)[:, -1]
    for _ in range(2):  # each time at the same position
        for call in (case.reference, case.fused):
            (logits,) = call(mx.array([[7]]))
            assert mx.allclose(logits, expected, atol=1e-4).item()
    token = mx.argmax(expected, axis=-1, keepdims=True)
    assert mx.array_equal(case.next_inputs(case.inputs, case.reference(mx.array([[7]])))[0], token).item()
    assert 1 <= case.calls <= 16 and case.queued


def test_a_queued_case_is_timed_with_the_making_of_its_graph(model) -> None:
    device = StandIn(noise=0.02)
    case = step_case(model, REFERENCE)

    def with_host_time(seconds: float):
        def call(token: mx.array) -> list[mx.array]:
            device.now += seconds  # on the host
            device.spend(1e-6)
            return case.reference(token)

        return call

    slow = replace(case, calls=2, fused=with_host_time(3e-3), reference=with_host_time(1e-3))
    assert try_kernel([slow], device, Timing()).ratio == pytest.approx(3, abs=0.1)
    assert try_kernel([replace(slow, queued=False)], device, Timing()).ratio == pytest.approx(1, abs=0.02)


@pytest.mark.skipif(mx.metal.is_available(), reason="kernels run here")
def test_where_kernels_cannot_run_none_is_used_and_the_log_says_why(model, tmp_path, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        cases = {kernel: cases for kernel, cases in model_cases(model).items() if kernel in METAL}
        chosen = choose(cases, DecisionFile(tmp_path / "k.json"), "Linux", device=StandIn())
    assert chosen.kernels == REFERENCE
    assert {each.state for by_rows in chosen.decisions.values() for each in by_rows.values()} == {"failed"}
    assert all("No Metal back-end" in record.getMessage() for record in caplog.records)
    decision = try_kernel([step_case(model, FUSED)], StandIn(), Timing())
    assert decision.state == "failed" and "No Metal back-end" in decision.reason
    model.use(REFERENCE)


@in_the_harness
def test_shipped_kernels_pass_their_trials_on_emulated_metal(model) -> None:
    """In float32, because the CPU's 16-bit products are too inexact to serve as references."""
    cases = [case for each in model_cases(model).values() for case in each]
    with emulated() as emulation:
        for case in cases:
            assert difference(case, StandIn()) is None, case.key
    assert all(emulation.called(f"llama3_{kernel}") for kernel in METAL)


@in_the_harness
def test_shipped_kernels_pass_together_on_emulated_metal(model) -> None:
    with emulated() as emulation:
        assert difference(step_case(model, replace(FUSED, sdpa_quantized=Rows.NONE)), StandIn()) is None
    used = [kernel for kernel in METAL if kernel not in ("sdpa_quantized", "swiglu_qmv")]  # one does it with the norm
    assert all(emulation.called(f"llama3_{kernel}") for kernel in used)
    model.use(REFERENCE)


@in_the_harness
def test_a_bug_in_a_kernel_is_detected_on_emulated_metal(model, monkeypatch) -> None:
    (case, *_) = model_cases(model)["rope_qkv"]
    monkeypatch.setattr(rope_qkv, "SOURCE", rope_qkv.SOURCE.replace("float(low) * sine +", "float(low) * sine -"))
    with emulated(rope_qkv._kernel):
        decision = try_kernel([case], StandIn(), Timing())
    rope_qkv._kernel.cache_clear()
    assert decision.state == "failed" and "one token: output 0 differs by" in decision.reason
