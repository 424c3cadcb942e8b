"""Hugging Face folders in all their forms: one set of weights is chosen, and all tensors are read from it."""

import json
from pathlib import Path

import numpy as np
import pytest
from meta_checkpoint import PARAMS, meta_weights, write_meta
from tiny_models import ARGS, quantized, random_weights, tiny_args, write_folder
from torch_zip import bf16_bits, write_pth

from convert.conversion.to_gguf import to_gguf
from convert.sources.huggingface import open_huggingface
from convert.sources.open import open_source
from convert.sources.source import Source
from mlx_llama3.checkpoint.config_json import to_hf
from mlx_llama3.checkpoint.quantization import Quantization
from mlx_llama3.errors import UserError

import mlx.core as mx

WEIGHTS = random_weights(ARGS)


def same_values(source: Source, weights: dict[str, mx.array]) -> None:
    assert source.tensors.keys() == weights.keys()
    for name, expected in weights.items():
        tensor = source.tensors[name]
        rows = tensor.rows(0, tensor.shape[0])
        assert rows.dtype == tensor.dtype == expected.dtype and tensor.shape == expected.shape
        assert mx.array_equal(rows, expected).item(), name
        assert mx.array_equal(tensor.rows(3, 7), expected[3:7]).item()


def sharded(folder: Path, weights: dict[str, mx.array], index: bool = True) -> Path:
    """Three files, as transformers names them."""
    write_folder(folder, ARGS, {})
    (folder / "model.safetensors").unlink()
    names = list(weights)
    weight_map = {}
    for n in range(3):
        file = f"model-{n + 1:05}-of-00003.safetensors"
        part = {name: weights[name] for name in names[n::3]}
        mx.save_safetensors(str(folder / file), part, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def torch_files(folder: Path, count: int = 1, index: bool = False) -> Path:
    write_folder(folder, ARGS, {})
    (folder / "model.safetensors").unlink()
    names = list(WEIGHTS)
    weight_map = {}
    for n in range(count):
        file = "pytorch_model.bin" if count == 1 else f"pytorch_model-{n + 1:05}-of-{count:05}.bin"
        part = {name: ("F32", np.asarray(WEIGHTS[name])) for name in names[n::count]}
        part[f"model.layers.{n}.self_attn.rotary_emb.inv_freq"] = ("F32", np.ones(8, np.float32))
        write_pth(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    if index:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_one_file(tmp_path):
    source = open_huggingface(write_folder(tmp_path, ARGS, WEIGHTS))
    assert source.kind == "Hugging Face folder, 1 safetensors file" and source.args == ARGS
    same_values(source, WEIGHTS)


@pytest.mark.parametrize("index", [True, False])
def test_several_files_with_and_without_index(tmp_path, index):
    source = open_huggingface(sharded(tmp_path, WEIGHTS, index))
    assert source.kind == "Hugging Face folder, 3 safetensors files"
    same_values(source, WEIGHTS)


def test_files_of_early_mlx_lm(tmp_path):
    folder = write_folder(tmp_path, ARGS, WEIGHTS)
    (folder / "model.safetensors").rename(folder / "weights.00.safetensors")
    same_values(open_huggingface(folder), WEIGHTS)


@pytest.mark.parametrize("count, index", [(1, False), (2, True), (3, False)])
def test_torch_files(tmp_path, count, index):
    source = open_huggingface(torch_files(tmp_path, count, index))
    assert source.kind == f"Hugging Face folder, {count} torch file{'s' if count > 1 else ''}"
    same_values(source, WEIGHTS)


def test_bfloat16_torch_file(tmp_path):
    folder = torch_files(tmp_path)
    bits = {name: bf16_bits(np.asarray(value)) for name, value in WEIGHTS.items()}
    write_pth(folder / "pytorch_model.bin", {name: ("BF16", array) for name, array in bits.items()})
    same_values(open_huggingface(folder), {name: mx.array(array).view(mx.bfloat16) for name, array in bits.items()})


@pytest.mark.parametrize("index", [True, False])
def test_other_weights_beside_are_ignored_and_named(tmp_path, index):
    """The hub's Llama folders hold Meta's files too, as one consolidated file or below original/."""
    folder = sharded(tmp_path, WEIGHTS, index)
    mx.save_safetensors(str(folder / "consolidated.safetensors"), {"tok_embeddings.weight": mx.zeros((2, 2))})
    torch = {name: ("F32", np.zeros(array.shape, np.float32)) for name, array in WEIGHTS.items()}
    write_pth(folder / "pytorch_model.bin", torch)
    write_meta(folder / "original")
    source = open_source(folder)
    same_values(source, WEIGHTS)
    assert source.notes[0] == (
        "read model-00001-of-00003.safetensors ...; ignored consolidated.safetensors, pytorch_model.bin, original/, "
        "other weights beside it"
    )


def test_both_dialects_of_config(tmp_path):
    config = to_hf(ARGS)
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    new = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    for name, dialect in (("old", old), ("new", new)):
        write_folder(tmp_path / name, ARGS, WEIGHTS)
        (tmp_path / name / "config.json").write_text(json.dumps(dialect))
        assert open_huggingface(tmp_path / name).args == ARGS


def test_tied_head_is_left_out(tmp_path):
    """Some folders hold the head although it is tied."""
    args = tiny_args(tie_word_embeddings=True)
    source = open_huggingface(write_folder(tmp_path, args, WEIGHTS))
    assert "lm_head.weight" not in source.tensors and source.args.tie_word_embeddings


def test_token_ids_of_both_files(tmp_path):
    folder = write_folder(tmp_path, ARGS, WEIGHTS, bos_token_id=1, eos_token_id=2, pad_token_id=None)
    assert open_huggingface(folder).generation_config == {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "temperature": 0.6}))
    assert open_huggingface(folder).generation_config == {"bos_token_id": 1, "eos_token_id": [2, 3], "temperature": 0.6}


@pytest.mark.parametrize("mode, bits, group_size", [("affine", 4, 32), ("affine", 6, 64), ("mxfp4", 4, 32)])
def test_folder_quantized_by_mlx(tmp_path, mode, bits, group_size):
    """Norms and matrices whose rows are not whole groups are dense."""
    settings = {"bits": bits, "group_size": group_size, "mode": mode}
    half = {name: array.astype(mx.bfloat16) for name, array in WEIGHTS.items()}
    odd = {n: half.pop(n) for n in [n for n in half if group_size == 64 and "down_proj" in n]}
    packed = quantized(half, **settings) | odd
    source = open_huggingface(write_folder(tmp_path, ARGS, packed, quantization=settings, quantization_config=settings))
    assert source.kind == "MLX-quantized folder, 1 safetensors file"
    for name in half | odd:
        tensor, module = source.tensors[name], name.removesuffix(".weight")
        assert tensor.dtype == mx.bfloat16
        if f"{module}.scales" not in packed:
            assert tensor.quantization is None
            assert mx.array_equal(tensor.rows(0, tensor.shape[0]), packed[name]).item()
            continue
        assert tensor.quantization == Quantization(bits, group_size, mode)
        parts = [packed[name], packed[f"{module}.scales"], packed.get(f"{module}.biases")]
        rows = tensor.quantized_rows(2, 9)
        assert mx.array_equal(rows.weight, parts[0][2:9]).item() and mx.array_equal(rows.scales, parts[1][2:9]).item()
        assert rows.biases is None if parts[2] is None else mx.array_equal(rows.biases, parts[2][2:9]).item()
        wide = [part.astype(mx.float32) if mode == "affine" else part for part in parts[1:] if part is not None]
        dense = mx.dequantize(parts[0], *wide, **settings, dtype=mx.float32)
        assert mx.array_equal(tensor.rows(0, tensor.shape[0]), dense).item()


def test_mixed_quantization(tmp_path):
    packed = quantized(WEIGHTS, bits=4)
    name = "model.layers.1.self_attn.v_proj"
    parts = mx.quantize(WEIGHTS[f"{name}.weight"], group_size=64, bits=8)
    packed |= {f"{name}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts, strict=True)}
    settings = {"bits": 4, "group_size": 32, name: {"bits": 8, "group_size": 64}}
    source = open_huggingface(write_folder(tmp_path, ARGS, packed, quantization=settings))
    assert source.tensors[f"{name}.weight"].quantization == Quantization(8, 64)
    assert source.tensors["model.layers.0.self_attn.v_proj.weight"].quantization == Quantization(4, 32)


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        open_source(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def without(name: str) -> dict[str, mx.array]:
    return {key: value for key, value in WEIGHTS.items() if key != name}


def test_missing_unknown_and_misshapen_tensors(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    assert f"{name} is missing" in refused(write_folder(tmp_path / "a", ARGS, without(name)))
    more = WEIGHTS | {"model.layers.0.self_attn.q_proj.bias": mx.zeros((64,))}
    assert "q_proj.bias' is not part of" in refused(write_folder(tmp_path / "b", ARGS, more))
    turned = WEIGHTS | {name: WEIGHTS[name].T}
    assert f"{name} has shape (64, 96), config.json means (96, 64)" in refused(
        write_folder(tmp_path / "c", ARGS, turned)
    )
    whole = WEIGHTS | {name: mx.zeros((96, 64), mx.int8)}
    assert f"{name} is stored as I8" in refused(write_folder(tmp_path / "d", ARGS, whole))


def test_tensor_in_two_files(tmp_path):
    folder = sharded(tmp_path, WEIGHTS)
    path = folder / "model-00002-of-00003.safetensors"
    tensors = mx.load(str(path)) | {"model.embed_tokens.weight": mx.zeros((320, 64))}
    mx.eval(tensors)  # before the file that they are read from is written
    mx.save_safetensors(str(path), tensors)
    assert "model.embed_tokens.weight is in model-00001-of-00003.safetensors too" in refused(folder)


@pytest.mark.parametrize("index", [True, False])
def test_missing_file(tmp_path, index):
    folder = sharded(tmp_path, WEIGHTS, index)
    (folder / "model-00002-of-00003.safetensors").unlink()
    expected = "missing, though model.safetensors.index.json names it" if index else "2 of 3 numbered weight files"
    assert expected in refused(folder)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 3}, {"a": "../../etc/passwd"}, {"a": "/etc/passwd"}])
def test_index_that_makes_no_sense(tmp_path, weight_map):
    folder = sharded(tmp_path, WEIGHTS)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "model.safetensors.index.json: " in refused(folder)


def test_weights_quantized_by_others(tmp_path):
    packed = WEIGHTS | {"model.layers.0.mlp.down_proj.qweight": mx.zeros((8, 8), mx.int32)}
    folder = write_folder(tmp_path, ARGS, packed, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantized with 'gptq', which MLX cannot read" in refused(folder)


def test_quantized_tensors_without_settings_or_biases(tmp_path):
    packed = quantized(WEIGHTS)
    assert "quantization: no bits and group_size" in refused(write_folder(tmp_path / "a", ARGS, packed))
    settings = {"bits": 4, "group_size": 32}
    name = "model.embed_tokens.biases"
    broken = {key: value for key, value in packed.items() if key != name}
    assert "lacks its biases" in refused(write_folder(tmp_path / "b", ARGS, broken, quantization=settings))
    other = {"bits": 8, "group_size": 32}
    assert "has shape (320, 8), config.json means (320, 16)" in refused(
        write_folder(tmp_path / "c", ARGS, packed, quantization=other)
    )


def test_what_the_path_holds_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    assert "found notes.txt; expected params.json" in refused(tmp_path)
    assert "give the folder that holds it" in refused(tmp_path / "notes.txt")
    assert "no such file or folder" in refused(tmp_path / "nowhere")
    (tmp_path / "a").mkdir()
    assert "found nothing" in refused(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("{}")
    assert "config.json is there, but no model*.safetensors" in refused(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "consolidated.00.pth").write_bytes(b"")
    assert "consolidated files are there, but no params.json" in refused(tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "model.safetensors").write_bytes(b"")
    assert "weights are there, but no config.json" in refused(tmp_path / "c")


def test_options_of_other_kinds_of_checkpoints(tmp_path):
    folder, meta = write_folder(tmp_path / "a", ARGS), write_meta(tmp_path / "b")
    for options, source in (
        ({"rope_factor": 8.0}, folder),
        ({"exact_scales": True}, folder),
        ({"exact_scales": True}, meta),
    ):
        with pytest.raises(UserError, match="--(rope-factor|exact-scales) is for .*; .*leave it out"):
            open_source(source, **options)


def test_folder_that_holds_only_original(tmp_path):
    write_meta(tmp_path / "original")
    (tmp_path / "config.json").write_text(json.dumps(to_hf(ARGS)))
    source = open_source(tmp_path)
    assert source.kind == "Meta checkpoint, 1 shard" and source.path == tmp_path / "original"
    embedding = source.tensors["model.embed_tokens.weight"].rows(0, PARAMS["vocab_size"])
    np.testing.assert_array_equal(embedding.astype(mx.float32), meta_weights()["tok_embeddings.weight"])


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 9085657\n"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "merges.txt"])
def test_a_pointer_of_git_lfs_for_a_tokenizer(tmp_path, name):
    folder = write_folder(tmp_path, ARGS, WEIGHTS)
    (folder / "tokenizer.json").write_text("{}")
    (folder / name).write_text(POINTER)
    assert f"{name}: is a pointer of git-lfs, not the file itself; run `git lfs pull`" in refused(folder)


def test_a_tokenizer_that_cannot_be_used_here_is_noted(tmp_path, demo_folder):
    folder = write_folder(tmp_path, ARGS, WEIGHTS)
    document = json.loads((demo_folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(document))
    assert open_source(folder).notes == []
    document["added_tokens"][5]["rstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(document))
    [note] = open_source(folder).notes
    assert f"{folder}/tokenizer.json" in note and note.endswith("; the new folder runs here, but not on text")
    with pytest.raises(UserError, match=f"{folder}/tokenizer.json"):
        to_gguf(folder, tmp_path / "m.gguf", progress=False)


@pytest.mark.parametrize("value", ["x", "128001", [1, "2"], 1.5, True, {}])
def test_an_end_that_is_no_number(tmp_path, value):
    folder = write_folder(tmp_path, ARGS, WEIGHTS, eos_token_id=value)
    assert "eos_token_id is " in refused(folder) and "expected a token's number or a list" in refused(folder)
    (write_folder(folder, ARGS, WEIGHTS) / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert "expected a token's number or a list" in refused(folder)
