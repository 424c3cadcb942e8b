"""Loading model folders: the resulting model, and the errors, which name the file or tensor."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from cpu_only import cpu_only
from tiny_models import ARGS, quantized, random_weights, tiny_args, write_folder

from mlx_llama3.checkpoint import loading
from mlx_llama3.checkpoint.config_json import to_hf
from mlx_llama3.checkpoint.folder import Checkpoint
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.errors import UserError
from mlx_llama3.system import memory

import mlx.core as mx
from mlx.utils import tree_flatten

TOKENS = mx.array([[1, 2, 3, 4, 5]])


@cpu_only
def test_dense_16_bit_becomes_float32_on_the_cpu(tmp_path):
    weights = {name: w.astype(mx.bfloat16) for name, w in random_weights(ARGS).items()}
    model = load_model(write_folder(tmp_path, ARGS, weights))
    expected = load_model(
        write_folder(tmp_path / "f32", ARGS, {name: w.astype(mx.float32) for name, w in weights.items()})
    )
    assert model(TOKENS).dtype == mx.float32
    assert mx.array_equal(model(TOKENS), expected(TOKENS)).item()


@pytest.mark.parametrize(
    "settings",
    [{"bits": 4, "group_size": 32}, {"bits": 8, "group_size": 64}, {"bits": 4, "group_size": 32, "mode": "mxfp4"}],
)
def test_quantized_equals_its_dequantized_weights(tmp_path, settings, monkeypatch):
    args = tiny_args(dim=128, hidden_dim=128)
    packed = quantized(random_weights(args), **settings)
    folder = write_folder(tmp_path / "q", args, packed, quantization=settings)
    dense = {}
    for name, weight in packed.items():
        module = name.removesuffix(".weight")
        if f"{module}.scales" in packed:
            dense[name] = mx.dequantize(weight, packed[f"{module}.scales"], packed.get(f"{module}.biases"), **settings)
        elif name.endswith(".weight"):
            dense[name] = weight
    expected = load_model(write_folder(tmp_path / "d", args, dense), dtype=mx.float32)(TOKENS)
    assert mx.abs(load_model(folder, dtype=mx.float32)(TOKENS) - expected).max().item() < 1e-5
    # The same where the unpacked weights do not fit: products with packed weights, as on a GPU.
    monkeypatch.setattr(loading, "_fits_expanded", lambda *_: False)
    packed_model = load_model(folder, dtype=mx.float32)
    assert packed_model.layers[0].attention.wqkv.parts[0].weight.dtype == mx.uint32
    assert mx.abs(packed_model(TOKENS) - expected).max().item() < 1e-4


def test_mixed_recipe_from_overrides(tmp_path, monkeypatch):
    """`wv` and the first `w2` with 8 bits, one matrix dense, as mlx-lm's recipes write it."""
    args = tiny_args(dim=128, hidden_dim=128)
    weights = random_weights(args)
    packed = quantized(weights)
    more = [f"model.layers.{i}.self_attn.v_proj" for i in range(3)] + ["model.layers.0.mlp.down_proj"]
    for module in more:
        packed |= quantized({f"{module}.weight": weights[f"{module}.weight"]}, bits=8)
    dense = "model.layers.1.self_attn.o_proj"
    del packed[f"{dense}.scales"], packed[f"{dense}.biases"]
    packed[f"{dense}.weight"] = weights[f"{dense}.weight"]
    settings = {"bits": 4, "group_size": 32, dense: False} | {m: {"bits": 8, "group_size": 32} for m in more}
    folder = write_folder(tmp_path, args, packed, quantization=settings, quantization_config=settings)
    expected = load_model(folder)(TOKENS)
    monkeypatch.setattr(loading, "_fits_expanded", lambda *_: False)
    packed_model = load_model(folder)
    assert [part.bits for part in packed_model.layers[0].attention.wqkv.parts] == [4, 8]
    assert mx.abs(packed_model(TOKENS) - expected).max().item() < 1e-4


def test_scales_take_the_activation_dtype(tmp_path, monkeypatch):
    """float32 scales, or float16 scales with bfloat16 activations, would make every product float32 in silence."""
    monkeypatch.setattr(loading, "_fits_expanded", lambda *_: False)
    settings = {"bits": 4, "group_size": 32}
    folder = write_folder(tmp_path, ARGS, quantized(random_weights(ARGS)), quantization=settings)
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        model = load_model(folder, dtype=dtype)
        assert model.layers[0].attention.wqkv.parts[0].scales.dtype == dtype
        assert model(TOKENS).dtype == dtype


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize(("mode", "bits", "group_size"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_format_without_scales_of_its_own_dtype_takes_that_of_the_norms(
    tmp_path, monkeypatch, mode, bits, group_size, tied, dtype
):
    """MLX's embedding gives bfloat16 for these; with float16 norms all sums would be float32 in silence."""
    monkeypatch.setattr(loading, "_fits_expanded", lambda *_: False)
    args = tiny_args(tie_word_embeddings=tied)
    settings = {"bits": bits, "group_size": group_size, "mode": mode}
    packed = quantized(random_weights(args), **settings)
    stored = {name: w.astype(dtype) if mx.issubdtype(w.dtype, mx.floating) else w for name, w in packed.items()}
    model = load_model(write_folder(tmp_path, args, stored, quantization=settings), dtype=dtype)
    embedding = "model.embed_tokens"
    rows = mx.dequantize(packed[f"{embedding}.weight"], packed[f"{embedding}.scales"], dtype=mx.float32, **settings)
    assert mx.array_equal(model.tok_embeddings(TOKENS), rows[TOKENS].astype(dtype)).item()
    assert model.residual(TOKENS).dtype == model(TOKENS).dtype == dtype


def test_sharded_with_index_and_a_second_set_beside(tmp_path):
    weights = random_weights(ARGS)
    expected = load_model(write_folder(tmp_path / "whole", ARGS, weights))(TOKENS)
    folder = write_folder(tmp_path / "parts", ARGS, weights)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:11], "model-00002-of-00002.safetensors": names[11:]}
    for file, part in shards.items():
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in part})
    mx.save_safetensors(str(folder / "consolidated.safetensors"), {"norm.weight": weights["model.norm.weight"]})
    assert mx.array_equal(load_model(folder)(TOKENS), expected).item()  # an index is not required
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert mx.array_equal(load_model(folder)(TOKENS), expected).item()
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="model-00002-of-00002.safetensors: missing"):
        load_model(folder)


def test_a_tensor_in_two_files(tmp_path):
    weights = random_weights(ARGS)
    folder = write_folder(tmp_path, ARGS, weights)
    mx.save_safetensors(str(folder / "model-2.safetensors"), {"model.norm.weight": weights["model.norm.weight"]})
    with pytest.raises(UserError, match="model.norm.weight is in another file of this folder too"):
        load_model(folder)


def test_large_sums_of_float16_are_no_infinity(tmp_path):
    weights = {name: w.astype(mx.float16) for name, w in random_weights(ARGS).items()}
    weights["model.embed_tokens.weight"] = mx.full((320, 64), 9, mx.float16)  # a sum of 184,320; float16 ends at 65,504
    assert load_model(write_folder(tmp_path, ARGS, weights))(TOKENS).shape == (1, 5, 320)


def test_weights_are_never_in_memory_twice(tmp_path):
    args = tiny_args(dim=256, hidden_dim=1024, n_layers=6)
    folder = write_folder(tmp_path, args)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = load_model(folder)
    size = sum(w.nbytes for _, w in tree_flatten(model.parameters()))
    assert size <= mx.get_active_memory() - before < 1.05 * size
    assert mx.get_peak_memory() - before < 1.5 * size


@cpu_only
def test_unpacking_needs_little_memory_beside_the_result(tmp_path):
    """`mx.dequantize` of a whole matrix would need three times its size besides."""
    args = tiny_args(vocab_size=300_000)
    folder = write_folder(tmp_path, args, quantized(random_weights(args)), quantization={"bits": 4, "group_size": 32})
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = load_model(folder)
    size = sum(w.nbytes for _, w in tree_flatten(model.parameters()))
    assert size > 150e6  # the temporary memory is constant, about 30 MB
    assert mx.get_peak_memory() - before < 1.5 * size


def test_a_model_can_be_used_in_another_thread(tmp_path):
    """Every array must be evaluated, because a lazy one belongs to the thread that made it."""
    settings = {"bits": 4, "group_size": 32}
    for folder in (
        write_folder(tmp_path / "dense", ARGS),
        write_folder(tmp_path / "packed", ARGS, quantized(random_weights(ARGS)), quantization=settings),
    ):
        model = load_model(folder)
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(lambda model=model: model(TOKENS).max().item()).result() > 0


def test_rotary_buffers_and_a_stored_tied_head_are_dropped(tmp_path):
    args = tiny_args(tie_word_embeddings=True)
    weights = random_weights(args)
    expected = load_model(write_folder(tmp_path / "a", args, weights))(TOKENS)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = mx.ones(8)
    assert mx.array_equal(load_model(write_folder(tmp_path / "b", args, weights))(TOKENS), expected).item()


def change(name: str, value: mx.array | None) -> dict[str, mx.array]:
    weights = random_weights(ARGS)
    if value is None:
        del weights[name]
    else:
        weights[name] = value
    return weights


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.norm.weight", None, "model.norm.weight is missing"),
        ("model.norm.weight", mx.ones(63), r"model.norm.weight has shape \(63,\), config.json means \(64,\)"),
        ("model.layers.1.mlp.up_proj.bias", mx.ones(96), "up_proj.bias is not part of the Llama 3 model"),
        ("model.layers.3.input_layernorm.weight", mx.ones(64), "layers.3.input_layernorm.weight is not part of the"),
        ("model.norm.weight", mx.ones(64, mx.int32), "norm.weight is int32; expected float16, bfloat16 or float32"),
        ("model.layers.2.mlp.up_proj.weight", mx.full((96, 64), mx.nan), "layers.2.mlp.up_proj.weight holds NaN"),
        ("model.layers.0.input_layernorm.weight", mx.full((64,), mx.inf), "layers.0.input_layernorm.weight holds NaN"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, name, value, message):
    with pytest.raises(UserError, match=message):
        load_model(write_folder(tmp_path, ARGS, change(name, value)))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mlp.up_proj.weight", mx.ones((96, 8)), "up_proj.weight is float32; expected packed integers"),
        ("mlp.up_proj.scales", mx.ones((96, 2), mx.int32), "up_proj.scales is int32; expected float16"),
        ("mlp.up_proj.scales", mx.ones((95, 2)), r"up_proj.scales has shape \(95, 2\), config.json means \(96, 2\)"),
        ("mlp.up_proj.biases", None, "up_proj.biases is missing"),
        ("mlp.up_proj.biases", mx.full((96, 2), mx.nan), "up_proj.biases holds NaN"),
    ],
)
def test_packed_tensors_that_do_not_fit(tmp_path, name, value, message):
    packed = quantized(random_weights(ARGS)) | {f"model.layers.1.{name}": value}
    packed = {key: w for key, w in packed.items() if w is not None}
    with pytest.raises(UserError, match=f"layers.1.mlp.{message}"):
        load_model(write_folder(tmp_path, ARGS, packed, quantization={"bits": 4, "group_size": 32}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("q4", "quantization is 'q4', must be an object"),
        ({"bits": 7, "group_size": 32}, "MLX has no mode 'affine' with 7 bits and groups of 32"),
        ({"bits": 4, "group_size": 0}, "4 bits and groups of 0"),
        ({"bits": "4", "group_size": 32}, "'4' bits"),
        ({"bits": 4, "group_size": 32, "mode": "nvfp4"}, "no mode 'nvfp4' with 4 bits and groups of 32"),
        ({"bits": 4, "group_size": 32, "mode": "ternary"}, "no mode 'ternary'"),
        ({"bits": 3, "group_size": 32}, r"has shape \(320, 8\), config.json means \(320, 6\)"),
    ],
)
def test_formats_that_mlx_does_not_have(tmp_path, settings, message):
    folder = write_folder(tmp_path, ARGS, quantized(random_weights(ARGS)), quantization=settings)
    with pytest.raises(UserError, match=message):
        load_model(folder)


def test_more_layers_than_tensors(tmp_path):
    folder = write_folder(tmp_path, ARGS, num_hidden_layers=2_000_000_000)
    with pytest.raises(UserError, match="config.json means 2000000000 layers, the files hold 30 tensors"):
        load_model(folder)


@pytest.mark.parametrize("names", [5, {}, {"a": 5}, {"a": None}])
def test_an_index_that_names_no_files(tmp_path, names):
    folder = write_folder(tmp_path, ARGS)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(UserError, match="index.json: no weight_map"):
        load_model(folder)


def test_scales_without_settings(tmp_path):
    folder = write_folder(tmp_path, ARGS, quantized(random_weights(ARGS)))
    with pytest.raises(UserError, match="bits and group_size"):
        load_model(folder)


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        load_model(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no config.json"):
        load_model(tmp_path / "empty")
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "params.json").write_text("{}")
    with pytest.raises(UserError, match="mlx-llama3 convert"):
        load_model(tmp_path / "meta")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="mlx-llama3 convert"):
        load_model(tmp_path / "model.gguf")
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text(json.dumps(to_hf(ARGS)))
    with pytest.raises(UserError, match="no model"):
        load_model(tmp_path / "weightless")
    packed = random_weights(ARGS) | {"model.layers.0.mlp.down_proj.qweight": mx.zeros((8, 8), mx.int32)}
    gptq = write_folder(tmp_path / "gptq", ARGS, packed, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UserError, match="gptq"):
        load_model(gptq)


def test_truncated_file_is_named(tmp_path):
    folder = write_folder(tmp_path, ARGS)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="model.safetensors"):
        load_model(folder)


def test_larger_than_memory(tmp_path, monkeypatch):
    folder = write_folder(tmp_path, ARGS)
    for module in (loading, memory):
        monkeypatch.setattr(module, "available_memory", lambda: 100_000)
    with pytest.raises(UserError, match="needs 0.0 GB of memory, 0.0 GB are available; choose a smaller"):
        load_model(folder)


def test_memory_is_counted_in_the_dtype_that_the_weights_get(tmp_path, monkeypatch):
    """16-bit weights that become float32 take twice what the files say."""
    folder = write_folder(tmp_path, ARGS, {name: w.astype(mx.bfloat16) for name, w in random_weights(ARGS).items()})
    stored = Checkpoint(folder).nbytes
    for module in (loading, memory):
        monkeypatch.setattr(module, "available_memory", lambda: int(1.9 * stored))
    with pytest.raises(UserError, match="of memory, 0.0 GB are available"):
        load_model(folder, dtype=mx.float32)
    assert load_model(folder, dtype=mx.bfloat16)(TOKENS).dtype == mx.bfloat16


@cpu_only
def test_weights_that_do_not_fit_unpacked_stay_packed_and_that_is_logged(tmp_path, monkeypatch, caplog):
    folder = write_folder(tmp_path, ARGS, quantized(random_weights(ARGS)), quantization={"bits": 4, "group_size": 32})
    for module in (loading, memory):
        monkeypatch.setattr(module, "available_memory", lambda: 2 * Checkpoint(folder).nbytes)
    model = load_model(folder)
    assert model.layers[0].attention.wqkv.parts[0].weight.dtype == mx.uint32
    assert "do not fit unpacked; weights stay packed" in caplog.text


def test_available_memory_is_a_plausible_number_of_bytes():
    assert 10**8 < memory.available_memory() < 10**14


def test_checkpoint_reads_headers_only(tmp_path):
    checkpoint = Checkpoint(write_folder(tmp_path, ARGS))
    assert checkpoint.args == ARGS
    assert checkpoint.dtype == mx.float32
    assert checkpoint.nbytes == sum(w.nbytes for w in random_weights(ARGS).values())
