"""`verify` with an adapter: a folder that lost the adapter is not verified, though each tensor is within its bound."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_models import quantized, random_weights, tiny_args, write_folder

from convert.conversion.recipe import make_recipe
from convert.conversion.to_mlx import convert
from convert.verification.adapter_effect import AdapterEffect, adapter_effect
from convert.verification.verify import verify

import mlx.core as mx

ARGS = tiny_args(dim=128, hidden_dim=256, head_dim=32)
PACKING = {"bits": 4, "group_size": 32}
WEIGHTS = random_weights(ARGS)
MATRICES = ("self_attn.q_proj", "mlp.down_proj")


@pytest.fixture
def base(tmp_path) -> Path:
    return write_folder(tmp_path / "base", ARGS, quantized(WEIGHTS, **PACKING), quantization=PACKING)


@pytest.fixture
def adapter(tmp_path) -> Path:
    """Updates with 3 % of the weights' RMS."""
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(ARGS.n_layers):
        for name in MATRICES:
            columns = WEIGHTS[f"model.layers.{layer}.{name}.weight"].shape[1]
            module = f"model.layers.{layer}.{name}"
            tensors[f"{module}.lora_a"] = mx.array(rng.normal(size=(columns, 4)) / 2, mx.float32)
            tensors[f"{module}.lora_b"] = mx.array(rng.normal(size=(4, 128)) * 0.003, mx.float32)
    (tmp_path / "adapter").mkdir()
    mx.save_safetensors(str(tmp_path / "adapter" / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 1.0}}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path / "adapter"


def rounded_away(base: Path, adapter: Path, target: Path) -> Path:
    """The adapter fused as mlx-lm does: each matrix packed again in the base's format."""
    dense = target.with_name("dense")
    convert(base, dense, adapter=adapter, dequantize=True, dtype="float32", progress=False)
    fused, packed = mx.load(str(dense / "model.safetensors")), mx.load(str(base / "model.safetensors"))
    for layer in range(ARGS.n_layers):
        for name in MATRICES:
            module = f"model.layers.{layer}.{name}"
            parts = mx.quantize(fused[f"{module}.weight"], **PACKING)
            packed |= {f"{module}.{part}": p for part, p in zip(("weight", "scales", "biases"), parts, strict=True)}
    return write_folder(target, ARGS, packed, quantization=PACKING)


def test_folder_that_has_the_adapter(tmp_path, base, adapter):
    convert(base, tmp_path / "out", adapter=adapter, progress=False)
    verification = verify(tmp_path / "out", base, adapter=adapter, progress=False)
    assert verification.ok and verification.effect.kept == pytest.approx(1, abs=0.05)
    assert verification.effect.size > 5 * verification.effect.off > 0
    assert len(verification.lost) == 2 * ARGS.n_layers and max(verification.lost.values()) < 0.1
    assert "the folder keeps " in str(verification) and str(verification).endswith("\nverified")
    # The predictions alone can refute a folder, too.
    half = replace(verification, effect=AdapterEffect(size=2, kept=0.5, uncertainty=0, off=1))
    assert not half.ok and "\nWRONG: the adapter changes" in str(half) and str(half).endswith("NOT VERIFIED")


@pytest.mark.parametrize("run", [True, False])
def test_folder_that_lost_the_adapter(tmp_path, base, adapter, run):
    folder = rounded_away(base, adapter, tmp_path / "out")
    verification = verify(folder, base, adapter=adapter, run=run, progress=False)
    assert all(c.exact or c.within for c in verification.comparisons) and not verification.ok
    wrong = [line for line in str(verification).splitlines() if line.startswith("WRONG")]
    assert sum("of the adapter's update is lost" in line for line in wrong) == 2 * ARGS.n_layers
    assert len(wrong) == 2 * ARGS.n_layers + run and str(verification).endswith("NOT VERIFIED")
    if run:
        assert verification.effect.kept < 0.5 and "the folder keeps" in wrong[-1]


def test_folder_without_the_adapter(base, adapter):
    verification = verify(base, base, adapter=adapter, progress=False)
    assert not verification.ok and verification.effect.kept == pytest.approx(0, abs=0.01)
    assert all(share == pytest.approx(1, abs=0.01) for share in verification.lost.values())


def test_dense_base_packed_with_the_adapter(tmp_path, adapter):
    """The noise of 4 bits is larger than the effect, and is the same without the adapter."""
    dense = write_folder(tmp_path / "dense", ARGS, WEIGHTS)
    convert(dense, tmp_path / "out", adapter=adapter, recipe=make_recipe(4, group_size=32), progress=False)
    verification = verify(tmp_path / "out", dense, adapter=adapter, progress=False)
    assert verification.effect.off > verification.effect.size and verification.ok, str(verification)


def test_effect_of_known_sizes():
    """Half of an effect of 2 nats, with a constant that the folder adds with and without the adapter."""
    base, effect = mx.random.normal((8, 50)), mx.full((8, 50), 2.0)
    outcomes = {"source": base, "plain": base + 7, "unrounded": base + 7 + effect, "folder": base + 7 + effect / 2}
    half = adapter_effect(outcomes)
    assert (half.size, half.kept, half.off) == pytest.approx((2, 0.5, 8), rel=1e-5) and half.uncertainty < 1e-5
    assert (
        not half.ok
        and AdapterEffect(2, 0.5, 0.2, 1).ok
        and AdapterEffect(2, 0.91, 0, 1).ok
        and not AdapterEffect(2, 1.2, 0, 1).ok
    )
    unchanged = adapter_effect(dict.fromkeys(outcomes, base))
    assert (unchanged.size, unchanged.kept, unchanged.uncertainty) == (0, 1, 0) and unchanged.ok
