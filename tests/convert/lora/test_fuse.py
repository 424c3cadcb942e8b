"""Fused adapters give the same weights as fusing with PEFT and with mlx-lm."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_adapters import mlx_adapter, peft_folder
from tiny_models import ARGS, quantized, random_weights, write_folder
from torch_zip import write_pth

from convert.conversion.recipe import make_recipe
from convert.conversion.to_mlx import convert
from mlx_llama3.errors import UserError

import mlx.core as mx

PEFT = Path(__file__).parents[2] / "data" / "peft"
WEIGHTS = random_weights(ARGS)
LAYER = "model.layers.2.self_attn.q_proj"


def load(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / "model.safetensors"))


@pytest.mark.parametrize("name", ["lora", "rslora", "dora"])
def test_pefts_own_merge(tmp_path, name):
    """Alpha and rank by module, an embedding, a whole head, rank-stabilized scaling, DoRA; within 1e-6 in float32."""
    report = convert(PEFT / "base", tmp_path / "out", adapter=PEFT / name, dtype="float32", progress=False)
    actual, merged = load(tmp_path / "out"), mx.load(str(PEFT / name / "merged.safetensors"))
    base = mx.load(str(PEFT / "base" / "model.safetensors"))
    assert merged.keys() <= actual.keys()
    for key, array in actual.items():
        expected = merged[key] if key in merged else base[key].astype(mx.float32)
        assert mx.abs(array - expected).max().item() <= (1e-6 if key in merged else 0), key
    assert any(mx.abs(merged[key] - base[key]).max().item() > 0.01 for key in merged)
    assert f"the adapter {name} is fused into {len(merged)} tensors" in report.notes


def test_adapter_as_a_torch_file(tmp_path):
    shutil.copytree(PEFT / "lora", tmp_path / "lora")
    stored = mx.load(str(PEFT / "lora" / "adapter_model.safetensors"))
    write_pth(tmp_path / "lora" / "adapter_model.bin", {k: ("F32", np.asarray(v)) for k, v in stored.items()})
    (tmp_path / "lora" / "adapter_model.safetensors").unlink()
    convert(PEFT / "base", tmp_path / "a", adapter=tmp_path / "lora", dtype="float32", progress=False)
    convert(PEFT / "base", tmp_path / "b", adapter=PEFT / "lora", dtype="float32", progress=False)
    one, other = load(tmp_path / "a"), load(tmp_path / "b")
    assert all(mx.array_equal(one[key], other[key]).item() for key in one)


KEYS = ["self_attn.q_proj", "mlp.down_proj", "lm_head", "model.embed_tokens"]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("block", [1 << 24, 7])
def test_mlx_lms_own_fusion(tmp_path, monkeypatch, dora, block):
    """The last two layers, head and embedding."""
    monkeypatch.setattr("convert.conversion.plan._BLOCK_ELEMENTS", block * 64)
    folder = write_folder(tmp_path / "base", ARGS, WEIGHTS)
    expected = mlx_adapter(folder, tmp_path / "adapter", dora=dora, keys=KEYS)
    convert(folder, tmp_path / "out", adapter=tmp_path / "adapter", progress=False)
    actual = load(tmp_path / "out")
    assert actual.keys() == expected.keys()
    changed = 0
    for name, array in expected.items():
        assert mx.abs(actual[name] - array).max().item() < 1e-5, name
        changed += mx.abs(array - WEIGHTS[name]).max().item() > 1e-3
    assert changed == 6


def test_packed_base_is_packed_again_in_the_same_way(tmp_path):
    settings = {"group_size": 32, "bits": 4}
    folder = write_folder(tmp_path / "base", ARGS, quantized(WEIGHTS), quantization=settings)
    expected = mlx_adapter(folder, tmp_path / "adapter", keys=["self_attn.q_proj"])
    convert(folder, tmp_path / "out", adapter=tmp_path / "adapter", progress=False)
    actual = load(tmp_path / "out")
    assert (
        actual.keys() == expected.keys() and json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    )
    for part in ("weight", "scales", "biases"):
        assert mx.array_equal(actual[f"{LAYER}.{part}"], expected[f"{LAYER}.{part}"]).item()


def test_fused_and_then_quantized(tmp_path):
    folder = write_folder(tmp_path / "base", ARGS, WEIGHTS)
    expected = mlx_adapter(folder, tmp_path / "adapter", keys=["self_attn.q_proj"])
    convert(folder, tmp_path / "out", adapter=tmp_path / "adapter", recipe=make_recipe(8), progress=False)
    weight, scales, biases = (load(tmp_path / "out")[f"{LAYER}.{part}"] for part in ("weight", "scales", "biases"))
    dense = mx.dequantize(weight, scales, biases, group_size=64, bits=8)
    assert mx.abs(dense - expected[f"{LAYER}.weight"]).max().item() < 0.01


def test_full_finetune_of_mlx_lm(tmp_path):
    """A full fine-tune stores all weights of some layers, instead of low-rank updates."""
    (tmp_path / "adapter").mkdir()
    new = {f"{LAYER}.weight": mx.random.normal((64, 64)), "model.norm.weight": mx.random.normal((64,))}
    mx.save_safetensors(str(tmp_path / "adapter" / "adapters.safetensors"), new)
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "full"}))
    folder = write_folder(tmp_path / "base", ARGS, WEIGHTS)
    convert(folder, tmp_path / "out", adapter=tmp_path / "adapter", progress=False)
    for name, array in load(tmp_path / "out").items():
        assert mx.array_equal(array, new.get(name, WEIGHTS[name])).item()


def pair(module: str = LAYER, rows: int = 64, columns: int = 64, rank: int = 4) -> dict[str, mx.array]:
    prefix = f"base_model.model.{module}"
    return {f"{prefix}.lora_A.weight": mx.ones((rank, columns)), f"{prefix}.lora_B.weight": mx.ones((rows, rank))}


BAD = {
    "another kind": (pair(), {"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
    "bias": (pair(), {"lora_bias": True}, "lora_bias is set"),
    "activated": (pair(), {"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is set"),
    "PiSSA": (pair(), {"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base model"),
    "a pattern": (pair(), {"alpha_pattern": {"(a+)+$": 3}}, "'(a+)+$' is not a module's name"),
    "alpha": (pair(), {"lora_alpha": "8"}, "lora_alpha of model.layers.2.self_attn.q_proj is '8'"),
    "alpha too large": (pair(), {"lora_alpha": 10**400}, "expected a finite number"),
    "alpha NaN": (pair(), {"lora_alpha": float("nan")}, "is nan, expected a finite number"),
    "a list of patterns": (pair(), {"alpha_pattern": [1]}, "alpha_pattern is [1], expected an object"),
    "rank 0": (pair(rank=0), {}, "lacks one of its two low-rank matrices, or it is empty"),
    "one half": ({k: v for k, v in pair().items() if "lora_A" in k}, {}, "lacks one of its two low-rank matrices"),
    "ranks differ": (
        pair() | {f"base_model.model.{LAYER}.lora_B.weight": mx.ones((64, 3))},
        {},
        "do not fit each other",
    ),
    "another model": (pair(columns=48), {}, "is (64, 48), the model has (64, 64); it belongs to another model"),
    "unknown module": (
        pair("model.layers.9.mlp.up_proj"),
        {},
        "'model.layers.9.mlp.up_proj.weight', which the model does not",
    ),
    "stray tensor": (pair() | {"base_model.model.x.bias": mx.ones((3,))}, {}, "is neither part of a low-rank update"),
    "int8": ({name: array.astype(mx.int8) for name, array in pair().items()}, {}, "is stored as I8"),
    "nothing": ({}, {}, "the adapter changes nothing"),
}


@pytest.mark.parametrize("tensors, config, named", BAD.values(), ids=BAD)
def test_adapters_that_do_not_fit(tmp_path, tensors, config, named):
    folder = write_folder(tmp_path / "base", ARGS, WEIGHTS)
    with pytest.raises(UserError) as error:
        convert(folder, tmp_path / "out", adapter=peft_folder(tmp_path, tensors, **config), progress=False)
    assert named in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_folder_without_an_adapter(tmp_path):
    folder = write_folder(tmp_path / "base", ARGS, WEIGHTS)
    with pytest.raises(UserError, match=r"adapter_config\.json: no such file"):
        convert(folder, tmp_path / "out", adapter=folder, progress=False)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="no adapter_model.safetensors"):
        convert(folder, tmp_path / "out", adapter=folder, progress=False)


@pytest.mark.parametrize("scale", [None, True, "2", 10**400, float("inf")])
def test_scale_of_mlx_lm_that_is_no_number(tmp_path, scale):
    folder = write_folder(tmp_path / "base", ARGS, WEIGHTS)
    mlx_adapter(folder, tmp_path / "adapter", keys=["self_attn.q_proj"])
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": scale}}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"expected fine_tune_type and lora_parameters\.scale"):
        convert(folder, tmp_path / "out", adapter=tmp_path / "adapter", progress=False)
