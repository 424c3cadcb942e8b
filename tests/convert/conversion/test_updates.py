"""An adapter's update reaches the folder: what its packing would round away gets more bits, and the report says so."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import quantized, random_weights, tiny_args, write_folder
from tokenizer_samples import small_bpe

from convert.conversion.plan import make_plan
from convert.conversion.recipe import MODES, make_recipe
from convert.conversion.to_gguf import to_gguf
from convert.conversion.to_mlx import convert
from convert.conversion.updates import hold_updates, loss_notes, update_loss
from convert.gguf.split_files import read_gguf
from convert.lora.fuse import with_adapter
from convert.sources.open import open_source
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.checkpoint.quantization import Quantization

import mlx.core as mx

ARGS = tiny_args(dim=128, hidden_dim=256, head_dim=32)
WEIGHTS = random_weights(ARGS)
IDS = mx.array([list(range(20, 120))])
UPDATED = {"self_attn.q_proj": (128, 128), "self_attn.v_proj": (64, 128), "mlp.down_proj": (128, 256)}


def small_adapter(folder: Path, *, size: float = 0.03) -> Path:
    """An adapter of mlx-lm's whose updates have `size` of the weights' RMS, as those of trained adapters seen."""
    rng, tensors, rank = np.random.default_rng(0), {}, 4
    for layer in range(ARGS.n_layers):
        for name, (rows, columns) in UPDATED.items():
            a, b = rng.normal(size=(columns, rank)) / np.sqrt(rank), rng.normal(size=(rank, rows)) * size * 0.1
            module = f"model.layers.{layer}.{name}"
            tensors |= {f"{module}.lora_a": mx.array(a, mx.float32), f"{module}.lora_b": mx.array(b, mx.float32)}
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": rank, "scale": 1.0}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def packed_base(folder: Path, kind: str) -> Path:
    """The model packed: "4", "8" (bits in groups of 32), or one of MLX's modes."""
    chosen = MODES[kind] if kind in MODES else Quantization(int(kind), 32)
    settings = {"bits": chosen.bits, "group_size": chosen.group_size, "mode": chosen.mode}
    return write_folder(folder, ARGS, quantized(WEIGHTS, **settings), quantization=settings)


def logits(folder: Path) -> np.ndarray:
    model = load_model(folder)
    return np.asarray(model(IDS).astype(mx.float32))


def kept(base: Path, adapter: Path, fused: Path, work: Path) -> float:
    """The share of the adapter's effect on the logits that the fused folder has."""
    convert(base, work / "plain", dequantize=True, dtype="float32", progress=False)
    convert(base, work / "right", adapter=adapter, dequantize=True, dtype="float32", progress=False)
    plain, right = logits(work / "plain"), logits(work / "right")
    return float(np.vdot(logits(fused) - plain, right - plain) / np.vdot(right - plain, right - plain))


def quantization_of(folder: Path, module: str) -> dict:
    settings = json.loads((folder / "config.json").read_text())["quantization"]
    return settings.get(module, {key: settings[key] for key in ("bits", "group_size", "mode")})


@pytest.mark.parametrize("kind", ["4", "8", "mxfp4", "mxfp8", "nvfp4"])
def test_effect_of_an_adapter_on_a_packed_base(tmp_path, kind):
    base, adapter = packed_base(tmp_path / "base", kind), small_adapter(tmp_path / "adapter")
    report = convert(base, tmp_path / "fused", adapter=adapter, progress=False)
    assert kept(base, adapter, tmp_path / "fused", tmp_path) > 0.9
    eight = {"bits": 8, "group_size": 32, "mode": "affine"}
    for layer in range(ARGS.n_layers):
        for name in UPDATED:
            assert quantization_of(tmp_path / "fused", f"model.layers.{layer}.{name}") == eight
    note = next(note for note in report.notes if "update" in note or "would lose" in note)
    if kind == "8":
        assert note.startswith("at most ") and "of an update of the adapter is lost by rounding" in note
    else:
        names = "; ".join(f"{name} of layers 0-{ARGS.n_layers - 1}" for name in UPDATED)
        assert note.startswith("8-bit in groups of 32 instead of ") and names in note and note in str(report)
        # What the adapter leaves alone stays as it is.
        assert quantization_of(tmp_path / "fused", "model.layers.0.mlp.up_proj")["bits"] == int(kind[-1])


def test_update_that_4_bits_hold_keeps_4_bits(tmp_path):
    base, adapter = packed_base(tmp_path / "base", "4"), small_adapter(tmp_path / "adapter", size=1.0)
    report = convert(base, tmp_path / "fused", adapter=adapter, progress=False)
    assert quantization_of(tmp_path / "fused", "model.layers.0.self_attn.q_proj")["bits"] == 4
    assert not any("instead of" in note for note in report.notes)


def test_update_that_8_bits_lose_stays_dense(tmp_path):
    base, adapter = packed_base(tmp_path / "base", "4"), small_adapter(tmp_path / "adapter", size=0.0015)
    convert(base, tmp_path / "fused", adapter=adapter, progress=False)
    weights = mx.load(str(tmp_path / "fused" / "model.safetensors"))
    assert "model.layers.0.self_attn.q_proj.scales" not in weights and "lm_head.scales" in weights
    assert kept(base, adapter, tmp_path / "fused", tmp_path) > 0.9


def test_update_that_nothing_holds_is_said(tmp_path):
    """Added to bfloat16 weights, 0.03 % of them is below half of the last place."""
    base = write_folder(tmp_path / "base", ARGS, {name: array.astype(mx.bfloat16) for name, array in WEIGHTS.items()})
    adapter = small_adapter(tmp_path / "adapter", size=0.00003)
    report = convert(base, tmp_path / "fused", adapter=adapter, progress=False)
    (note,) = [note for note in report.notes if note.startswith("bfloat16 loses ")]
    assert "self_attn.q_proj of layers 0-2" in note and note.endswith("--dtype float32 holds it")
    report = convert(base, tmp_path / "wide", adapter=adapter, dtype="float32", progress=False)
    assert not any("loses" in note for note in report.notes)


def test_dense_base_keeps_the_bits_that_were_asked_for(tmp_path):
    """Weights between the steps are rounded either way, so on average an update arrives."""
    base, adapter = write_folder(tmp_path / "base", ARGS, WEIGHTS), small_adapter(tmp_path / "adapter", size=0.3)
    convert(base, tmp_path / "fused", adapter=adapter, recipe=make_recipe(4, group_size=32), progress=False)
    assert quantization_of(tmp_path / "fused", "model.layers.0.mlp.down_proj")["bits"] == 4


def test_loss_is_that_of_the_written_values(tmp_path, monkeypatch):
    """The projection, computed here by numpy from the values that MLX packs; in blocks of 7 rows."""
    monkeypatch.setattr("convert.conversion.plan._BLOCK_ELEMENTS", 7 * 256)
    base, adapter = packed_base(tmp_path / "base", "4"), small_adapter(tmp_path / "adapter")
    plan = make_plan(with_adapter(open_source(base), adapter))
    step = next(step for step in plan.steps if step.tensor.name == "model.layers.1.mlp.down_proj.weight")
    before, after = (np.asarray(side.rows(0, 128), np.float64) for side in (step.tensor.base, step.tensor))

    def packed(values):
        parts = mx.quantize(mx.array(values, mx.float32), group_size=32, bits=4)
        return np.asarray(mx.dequantize(*parts, group_size=32, bits=4), np.float64)

    arrived = np.vdot(packed(after) - before, after - before) / np.vdot(after - before, after - before)
    assert update_loss(step) == pytest.approx(1 - arrived, abs=1e-4) and 1 - arrived > 0.5


def test_plan_without_an_adapter_stays(tmp_path):
    plan = make_plan(open_source(packed_base(tmp_path, "4")))
    assert hold_updates(plan) == (plan, []) and loss_notes([]) == []


def test_gguf_of_a_packed_base(tmp_path):
    """Q4_1 would round the updates away as MLX's 4 bits do; a matrix without one is copied, bit for bit."""
    base, adapter = packed_base(tmp_path / "base", "4"), small_adapter(tmp_path / "adapter")
    small_bpe(vocab_size=300).save(str(base / "tokenizer.json"))
    report = to_gguf(base, tmp_path / "out.gguf", type_name="Q4_1", adapter=adapter, progress=False)
    convert(tmp_path / "out.gguf", tmp_path / "back", dequantize=True, dtype="float32", progress=False)
    assert kept(base, adapter, tmp_path / "back", tmp_path) > 0.9
    types = {name: tensor.type for name, tensor in read_gguf(tmp_path / "out.gguf").tensors.items()}
    assert types["blk.1.attn_q.weight"] == types["blk.2.ffn_down.weight"] == "Q8_0"
    assert types["blk.1.ffn_up.weight"] == "Q4_1"
    (note,) = [note for note in report.notes if "would lose" in note]
    assert note.startswith("Q8_0 instead of Q4_1 for self_attn.q_proj of layers 0-2; self_attn.v_proj of layers 0-2")


def test_gguf_of_a_tiny_update(tmp_path):
    """Where Q8_0 loses too much, F16 is taken; where that does, the report says what holds it."""
    base = packed_base(tmp_path / "base", "4")
    small_bpe(vocab_size=300).save(str(base / "tokenizer.json"))
    for size, kind, said in ((1e-4, "F16", "F16 instead of Q4_1"), (2e-6, "F16", "only an MLX folder in float32")):
        adapter = small_adapter(tmp_path / f"adapter-{size}", size=size)
        report = to_gguf(base, tmp_path / f"{size}.gguf", type_name="Q4_1", adapter=adapter, progress=False)
        assert read_gguf(tmp_path / f"{size}.gguf").tensors["blk.0.attn_q.weight"].type == kind
        assert any(said in note for note in report.notes), report.notes
