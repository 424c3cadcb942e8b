"""Checkpoints to GGUF and back: read by our reader and the gguf package, and compared with a record of llama.cpp."""

import json
import shutil

import gguf
import llama_cpp_record
import numpy as np
import pytest
from gguf_builder import MERGES, TOKENS
from tiny_gguf import ARGS, write_tiny
from tiny_models import quantized, random_weights, tiny_args, write_folder
from transformers import AutoTokenizer

from convert.conversion.to_gguf import to_gguf, write_model
from convert.conversion.to_mlx import convert
from convert.gguf.rope_factors import rope_factors
from convert.gguf.split_files import read_gguf
from convert.sources.gguf import open_gguf
from convert.sources.open import open_source
from mlx_llama3.errors import UserError
from mlx_llama3.model.config import RopeScaling
from mlx_llama3.tokenizer.tokenizer import load_tokenizer

import mlx.core as mx

VOCABULARY = llama_cpp_record.made_up_vocabulary()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out.gguf"


def values(path) -> dict[str, np.ndarray]:
    """Every tensor by its Hugging Face name, in Hugging Face's row order, float32."""
    tensors = open_gguf(path).tensors
    return {name: np.array(tensor.rows(0, tensor.shape[0]).astype(mx.float32)) for name, tensor in tensors.items()}


def test_demo_comes_back_byte_for_byte(tmp_path, demo_gguf, target):
    """GGUF -> GGUF in Q4_1: the same tensors, and the same tokenizer."""
    report = to_gguf(demo_gguf, target, type_name="Q4_1", progress=False)
    assert report.types == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert report.nbytes == target.stat().st_size
    ours, original = read_gguf(target), read_gguf(demo_gguf)
    assert ours.tensors.keys() == original.tensors.keys()
    for name, tensor in original.tensors.items():
        assert ours.tensors[name].type == tensor.type
        rows = tensor.n_rows
        np.testing.assert_array_equal(ours.tensors[name].read_rows(0, rows), tensor.read_rows(0, rows), err_msg=name)
    missing = {key for key in original.metadata.keys() - ours.metadata.keys() if not key.startswith("general.")}
    assert missing == {"tokenizer.ggml.unknown_token_id", "tokenizer.ggml.padding_token_id"}
    differ = [k for k in original.metadata.keys() & ours.metadata.keys() if ours.metadata[k] != original.metadata[k]]
    assert differ == ["general.name"]


def test_demo_through_an_mlx_folder(demo_gguf, demo_folder, target):
    """MLX's packing -> Q4_1 changes nothing; only the norms are rounded, to float16."""
    to_gguf(demo_folder, target, type_name="Q4_1", progress=False)
    ours, original = read_gguf(target).tensors, read_gguf(demo_gguf).tensors
    for name, tensor in original.items():
        if tensor.type != "F32":
            assert ours[name].type == tensor.type
            np.testing.assert_array_equal(
                ours[name].read_rows(0, tensor.n_rows), tensor.read_rows(0, tensor.n_rows), err_msg=name
            )


@pytest.mark.parametrize(
    "scaling", [None, RopeScaling(8.0), RopeScaling(32.0), RopeScaling(4.0, original_max_position=4096)]
)
def test_model_comes_back(tmp_path, target, scaling):
    args = tiny_args(head_dim=32, rope_theta=500000.0, rope_scaling=scaling, tie_word_embeddings=scaling is None)
    weights = {name: np.array(w) for name, w in random_weights(args).items()}
    source = open_source(write_folder(tmp_path / "folder", args))
    types = write_model(source, VOCABULARY, target, progress=False)
    matrices = sum(w.ndim == 2 for w in weights.values())
    assert types == {"F16": matrices, "F32": len(weights) - matrices + (scaling is not None)}
    assert open_gguf(target).args == args
    for name, actual in values(target).items():
        expected = weights[name] if weights[name].ndim == 1 else weights[name].astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(actual, expected, err_msg=name)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    if scaling:
        np.testing.assert_array_equal(stored["rope_freqs.weight"].data, rope_factors(args))


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1"])
def test_quantized_types(tmp_path, target, type_name):
    """Compared with the gguf package's quantizer; the embedding and head of Q4_1 files have 8 bits."""
    args = tiny_args()
    source = open_source(write_folder(tmp_path / "folder", args))
    write_model(source, VOCABULARY, target, type_name=type_name, progress=False)
    for name, weight in random_weights(args).items():
        expected = np.array(weight)
        if expected.ndim == 2:
            large = name in ("model.embed_tokens.weight", "lm_head.weight")
            kind = gguf.GGMLQuantizationType["Q8_0" if large else type_name]
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, kind), kind)
        np.testing.assert_array_equal(values(target)[name], expected, err_msg=name)


def test_q4_0_becomes_q4_1_without_a_change_of_value(tmp_path, target):
    write_tiny(tmp_path / "in.gguf", type_name="Q4_0")
    to_gguf(tmp_path / "in.gguf", target, type_name="Q4_1", progress=False)
    before, after = values(tmp_path / "in.gguf"), values(target)
    for name in before.keys() - {"model.embed_tokens.weight"}:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)


def test_adapter_is_fused(tmp_path, target):
    """mlx-lm's update `scale (a b)^T`, on a packed base: added to the unpacked values, rounded once to float16."""
    write_tiny(tmp_path / "in.gguf", type_name="Q4_0")
    module = "model.layers.1.self_attn.q_proj"
    a, b = (mx.random.normal(shape, key=mx.random.key(n)) for n, shape in enumerate([(256, 4), (4, 256)]))
    (tmp_path / "lora").mkdir()
    mx.save_safetensors(str(tmp_path / "lora" / "adapters.safetensors"), {f"{module}.lora_a": a, f"{module}.lora_b": b})
    (tmp_path / "lora" / "adapter_config.json").write_text('{"lora_parameters": {"scale": 0.5}}')
    report = to_gguf(tmp_path / "in.gguf", target, adapter=tmp_path / "lora", progress=False)
    assert "the adapter lora is fused into 1 tensors" in report.notes
    before, after = values(tmp_path / "in.gguf"), values(target)
    before[f"{module}.weight"] += np.array(0.5 * (a @ b).T)
    for name, array in before.items():
        expected = array.astype(np.float16).astype(np.float32) if array.ndim == 2 else array
        np.testing.assert_allclose(after[name], expected, rtol=1e-3 if "1.self_attn.q" in name else 0, err_msg=name)


def test_rows_that_are_not_whole_blocks_stay_in_16_bits(tmp_path, target):
    args = tiny_args(hidden_dim=72)
    write_model(
        open_source(write_folder(tmp_path / "folder", args)), VOCABULARY, target, type_name="Q8_0", progress=False
    )
    types = {name: tensor.type for name, tensor in read_gguf(target).tensors.items()}
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert types["blk.0.ffn_up.weight"] == "Q8_0"


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_mlx_4_bit_folders(tmp_path, target, group_size, dtype):
    """Scales that float16 holds exactly: no value changes. Other scales: the matrix is quantized again."""
    args = tiny_args(dim=128, hidden_dim=128, head_dim=32)
    weights = {name: weight.astype(dtype) for name, weight in random_weights(args).items()}
    packed = quantized(weights, group_size=group_size)
    config = {"quantization": {"group_size": group_size, "bits": 4}}
    source = open_source(write_folder(tmp_path / "folder", args, packed, **config))
    write_model(source, VOCABULARY, target, type_name="Q4_1", progress=False)
    name = "model.layers.1.self_attn.q_proj"
    parts = [packed[f"{name}.weight"], *(packed[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))]
    expected = np.array(mx.dequantize(*parts, group_size=group_size, bits=4))
    actual = values(target)[f"{name}.weight"]
    if dtype == mx.float32:
        np.testing.assert_allclose(actual, expected, atol=0.6 * float(parts[1].max()))
        assert not np.array_equal(actual, expected)
    else:
        np.testing.assert_array_equal(actual, expected)


def test_tokenizer_and_template(tmp_path, target):
    """GGUF -> GGUF: tokens, types, merges, ids, template; ids beyond the vocabulary are named and unused."""
    source = tmp_path / "in.gguf"
    write_tiny(source)
    to_gguf(source, target, progress=False)
    metadata = read_gguf(target).metadata
    assert metadata["tokenizer.ggml.tokens"] == TOKENS
    assert metadata["tokenizer.ggml.token_type"] == [1] * (len(TOKENS) - 3) + [3] * 3
    assert metadata["tokenizer.ggml.merges"] == MERGES
    assert metadata["tokenizer.ggml.pre"] == "llama-bpe"
    assert metadata["tokenizer.ggml.bos_token_id"] == TOKENS.index("<|begin_of_text|>")
    assert metadata["tokenizer.ggml.eos_token_id"] == TOKENS.index("<|eot_id|>")
    assert metadata["tokenizer.ggml.eot_token_id"] == TOKENS.index("<|eot_id|>")
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["general.name"] == "in"
    assert open_gguf(target).args == ARGS

    write_model(open_source(write_folder(tmp_path / "folder", tiny_args())), VOCABULARY, target, overwrite=True,
                chat_template="{{ messages }}", progress=False)  # fmt: skip
    metadata = read_gguf(target).metadata
    assert metadata["tokenizer.chat_template"] == "{{ messages }}"
    assert metadata["tokenizer.ggml.tokens"][255:258] == ["the", "[PAD256]", "[PAD257]"]
    assert metadata["tokenizer.ggml.token_type"][255:258] == [1, 5, 5]
    assert len(metadata["tokenizer.ggml.tokens"]) == 320


def test_named_templates_and_all_stop_ids_come_back(tmp_path, target):
    templates = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
    write_tiny(tmp_path / "in.gguf")
    convert(tmp_path / "in.gguf", tmp_path / "folder", progress=False)
    config = json.loads((tmp_path / "folder" / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    (tmp_path / "folder" / "tokenizer_config.json").write_text(json.dumps(config))
    eot, *others = TOKENS.index("<|eot_id|>"), 7, 40, 41  # as many as a GGUF has keys for, and one more
    (tmp_path / "folder" / "generation_config.json").write_text(json.dumps({"eos_token_id": [others[0], eot]}))

    report = to_gguf(tmp_path / "folder", target, progress=False)
    metadata = gguf.GGUFReader(target)
    assert metadata.get_field("tokenizer.chat_template.tool_use").contents() == templates["tool_use"]
    assert metadata.get_field("tokenizer.chat_template").contents() == templates["default"]
    assert sorted(metadata.get_field("tokenizer.chat_templates").contents()) == ["rag", "tool_use"]
    assert not any("stop ids" in note for note in report.notes)
    convert(target, tmp_path / "back", progress=False)
    back, first = load_tokenizer(tmp_path / "back"), load_tokenizer(tmp_path / "folder")
    assert back.chat_templates == first.chat_templates == templates
    assert back.stop_ids == first.stop_ids >= {eot, others[0]}
    assert AutoTokenizer.from_pretrained(tmp_path / "back").get_chat_template("rag") == templates["rag"]

    (tmp_path / "folder" / "generation_config.json").write_text(json.dumps({"eos_token_id": [eot, *others, 9999]}))
    report = to_gguf(tmp_path / "folder", target, overwrite=True, progress=False)
    assert any("three stop ids: 40, 41 stop nothing in llama.cpp" in note for note in report.notes)
    assert eot in read_gguf(target).metadata.values() and 7 in read_gguf(target).metadata.values()


@pytest.mark.parametrize("name", ["llama3-1shard", "llama31-2shards", "llama31-long"])
def test_same_file_as_llama_cpp_ran(target, name):
    """If this fails because the writer was changed on purpose: run the peers' test, then renew the record."""
    llama_cpp_record.write(name, target)
    assert llama_cpp_record.digest(target) == llama_cpp_record.RECORD["sha256"][name]


def refused(message: str, source, target, **options) -> None:
    with pytest.raises(UserError, match=message) as caught:
        to_gguf(source, target, progress=False, **options)
    assert "\n" not in str(caught.value)


def test_what_is_refused(tmp_path, target):
    source = tmp_path / "in.gguf"
    write_tiny(source)
    refused("'Q2_K' is not a type that can be written", source, target, type_name="Q2_K")
    refused("no such file", tmp_path / "none", target)
    refused("has no tokenizer", llama_cpp_record.DATA / "llama3-1shard", target)
    target.write_text("keep me")
    refused("exists already.*--overwrite", source, target)
    refused("is no GGUF file, so it is not overwritten", source, target, overwrite=True)
    assert target.read_text() == "keep me"
    target.write_bytes(b"GGUF of an earlier run")
    to_gguf(source, target, overwrite=True, progress=False)
    assert read_gguf(target).tensors


def test_values_that_float16_cannot_hold(tmp_path, target):
    args = tiny_args()
    for value in (1e7, float("nan")):
        weights = random_weights(args)
        weights["model.layers.2.mlp.up_proj.weight"][5, 7] = value
        source = open_source(write_folder(tmp_path / "folder", args, weights))
        for type_name in ("F16", "Q4_1"):
            with pytest.raises(UserError, match="up_proj.weight: holds values that are not finite, or too large"):
                write_model(source, VOCABULARY, target, type_name=type_name, progress=False)
            assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_disk_that_is_too_small(tmp_path, target, monkeypatch):
    write_tiny(tmp_path / "in.gguf")
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refused("out.gguf: needs 0.00 GB, but the disk has 0.00 GB free; make room", tmp_path / "in.gguf", target)
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


def test_more_tokens_than_rows(tmp_path, target):
    source = open_source(write_folder(tmp_path / "folder", tiny_args(vocab_size=200)))
    with pytest.raises(UserError, match="the tokenizer has 256 tokens, the embedding only 200 rows"):
        write_model(source, VOCABULARY, target, progress=False)


def test_record_is_whole():
    assert json.loads((llama_cpp_record.DATA / "llama-cpp.json").read_text()).keys() == {"llama_cpp_python", "sha256"}
