"""GGUF as a source: names, row order and values compared with weights in Hugging Face's layout; repacking."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
from gguf_builder import Entry, encoded, gguf_bytes
from tiny_gguf import ARGS, LAST_Q, entries, metadata, random_weights, write_k_quants, write_tiny

from convert.sources.gguf import open_gguf
from mlx_llama3.checkpoint.quantization import Quantization
from mlx_llama3.errors import UserError

import mlx.core as mx

K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def whole(tensor) -> np.ndarray:
    return np.array(tensor.rows(0, tensor.shape[0]).astype(mx.float32))


def unpacked(tensor, start: int, stop: int) -> np.ndarray:
    packed = tensor.quantized_rows(start, stop)
    quantization = tensor.quantization
    scales, biases = packed.scales.astype(mx.float32), packed.biases.astype(mx.float32)
    return np.array(
        mx.dequantize(packed.weight, scales, biases, group_size=quantization.group_size, bits=quantization.bits)
    )


def test_names_order_and_values(path):
    weights = write_tiny(path)
    source = open_gguf(path)
    assert source.args == ARGS
    assert list(source.tensors) == list(weights)
    for name, values in weights.items():
        tensor = source.tensors[name]
        assert (tensor.name, tensor.shape, tensor.dtype) == (name, values.shape, mx.float32)
        assert tensor.quantization is None and tensor.quantized_rows is None
        np.testing.assert_array_equal(whole(tensor), values)


@pytest.mark.parametrize("name", [LAST_Q, K_PROJ, "model.embed_tokens.weight", "model.norm.weight"])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (1, 64), (63, 65), (5, 128), (100, 128)])
def test_any_range_of_rows(path, name, start, stop):
    weights = write_tiny(path)
    rows = open_gguf(path).tensors[name].rows(start, stop)
    np.testing.assert_array_equal(np.array(rows), weights[name][start:stop])


@pytest.mark.parametrize(("type_name", "dtype"), [("F16", mx.float16), ("BF16", mx.bfloat16)])
def test_16_bit_types_stay_what_they_are(path, type_name, dtype):
    weights = write_tiny(path, type_name)
    tensor = open_gguf(path).tensors[LAST_Q]
    assert tensor.dtype == dtype == tensor.rows(0, 3).dtype
    expected = np.array(mx.array(weights[LAST_Q]).astype(dtype).astype(mx.float32))
    np.testing.assert_array_equal(whole(tensor), expected)


@pytest.mark.parametrize(("type_name", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q5_0", 5), ("Q5_1", 5), ("Q8_0", 8)])
def test_packed_types_are_kept_exactly(path, type_name, bits):
    weights = write_tiny(path, type_name)
    source = open_gguf(path)
    assert f"15 {type_name}" in source.kind
    kind = gguf.GGMLQuantizationType[type_name]
    for name, values in weights.items():
        tensor = source.tensors[name]
        if values.ndim == 1:
            assert tensor.quantization is None
            continue
        # Each row is packed on its own, so reordering rows does not change them.
        expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        assert tensor.quantization == Quantization(bits=bits, group_size=32)
        np.testing.assert_array_equal(whole(tensor), expected)
        np.testing.assert_array_equal(unpacked(tensor, 0, len(values)), expected)
        np.testing.assert_array_equal(unpacked(tensor, 65, 100), expected[65:100])
        assert tensor.quantized_rows(0, 1).scales.dtype == mx.float16


@pytest.mark.parametrize(("type_name", "bits"), [("Q4_K", 4), ("Q5_K", 5)])
def test_k_quants_with_groups_of_32(path, type_name, bits):
    expected = write_k_quants(path, type_name)
    source = open_gguf(path, exact_scales=True)
    tensor = source.tensors[LAST_Q]
    assert tensor.quantization == Quantization(bits=bits, group_size=32)
    assert tensor.quantized_rows(0, 1).scales.dtype == mx.float32
    np.testing.assert_array_equal(unpacked(tensor, 0, 256), expected)
    np.testing.assert_array_equal(whole(tensor), expected)
    assert source.notes == []

    source = open_gguf(path)
    tensor = source.tensors[LAST_Q]
    assert tensor.quantized_rows(0, 1).scales.dtype == mx.float16
    rounded = unpacked(tensor, 0, 256)
    error = np.sqrt(np.mean((rounded - expected) ** 2) / np.mean(expected**2))
    assert 0 < error < 2**-11
    np.testing.assert_array_equal(whole(tensor), expected)
    (note,) = source.notes
    assert note.startswith(f"1 tensors of type {type_name}: repacked with scales rounded to float16 (relative RMS")
    assert float(note.split("at most ")[1].split(" ")[0]) == pytest.approx(error, rel=0.2)


@pytest.mark.parametrize("type_name", ["Q2_K", "Q3_K", "Q6_K"])
def test_k_quants_with_groups_of_16_are_packed_anew(path, type_name):
    expected = write_k_quants(path, type_name)
    source = open_gguf(path)
    tensor = source.tensors[LAST_Q]
    np.testing.assert_array_equal(whole(tensor), expected)
    assert tensor.quantization == Quantization(bits=8, group_size=32)
    half_scales = np.repeat(np.array(tensor.quantized_rows(3, 70).scales.astype(mx.float32)), 32, axis=-1) / 2
    assert np.all(np.abs(unpacked(tensor, 3, 70) - expected[3:70]) <= half_scales * 1.001)
    spans = np.repeat(np.ptp(expected[3:70].reshape(67, -1, 32), axis=-1), 32, axis=-1)
    # A scale this small is rounded up to a multiple of 2**-24.
    assert np.all(half_scales <= spans / 509 + 2**-25)
    assert tensor.quantized_rows(0, 1).scales.dtype == mx.float16
    (note,) = source.notes
    assert note == f"1 tensors of type {type_name}: quantized again to 8 bits, as MLX has no groups of 16 weights"


def test_own_head_and_copied_head(path):
    weights = random_weights(replace(ARGS, tie_word_embeddings=False))
    path.write_bytes(gguf_bytes(metadata(), entries(weights)))
    source = open_gguf(path)
    assert not source.args.tie_word_embeddings
    np.testing.assert_array_equal(whole(source.tensors["lm_head.weight"]), weights["lm_head.weight"])

    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    path.write_bytes(gguf_bytes(metadata(), entries(weights)))
    source = open_gguf(path)
    assert source.args.tie_word_embeddings
    assert "lm_head.weight" not in source.tensors


def test_scales_that_are_not_finite(path):
    weights = write_tiny(path, "Q8_0")
    tensors = entries(weights, type_name="Q8_0")
    for scale in (600.0, np.nan, np.inf):
        raw = bytearray(tensors[0].data)
        raw[:2] = np.float16(scale).tobytes()
        path.write_bytes(gguf_bytes(metadata(), [tensors[0]._replace(data=bytes(raw)), *tensors[1:]]))
        tensor = open_gguf(path).tensors["model.embed_tokens.weight"]
        with pytest.raises(UserError, match="'token_embd.weight': scales from row 0 on are no finite float16"):
            tensor.quantized_rows(0, 4)
        tensor.quantized_rows(4, 8)


def changed(tensors: list[Entry], name: str, *replacement: Entry) -> list[Entry]:
    return [new for old in tensors for new in (replacement if old.name == name else (old,))]


BROKEN = {
    "missing tensor": (("blk.1.ffn_up.weight",), "'blk.1.ffn_up.weight' is missing"),
    "shape": (
        ("blk.0.attn_k.weight", encoded("blk.0.attn_k.weight", np.zeros((256, 256)))),
        r"'blk.0.attn_k.weight' has shape \(256, 256\), the metadata mean \(128, 256\)",
    ),
    "foreign tensor": (
        ("output_norm.weight", encoded("output_norm.weight", np.ones(256)), encoded("blk.0.attn_q.bias", np.ones(256))),
        "'blk.0.attn_q.bias' is not part of a Llama 3 model",
    ),
    "packed vector": (
        ("output_norm.weight", encoded("output_norm.weight", np.ones(256), "Q8_0")),
        "'output_norm.weight' is Q8_0, expected F32",
    ),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_tensors_that_do_not_fit(path, change, message):
    path.write_bytes(gguf_bytes(metadata(), changed(entries(random_weights()), *change)))
    with pytest.raises(UserError, match=message) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)


def test_demo_packed_and_unpacked(demo_gguf):
    source = open_gguf(demo_gguf)
    assert source.kind == "GGUF, 210 Q4_1, 61 F32, 1 Q8_0"
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(demo_gguf).tensors}
    for name, gguf_name, bits in [
        ("model.embed_tokens.weight", "token_embd.weight", 8),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight", 4),
    ]:
        tensor, rows = source.tensors[name], 300
        expected = gguf.quants.dequantize(stored[gguf_name].data[:rows], stored[gguf_name].tensor_type)
        assert tensor.quantization == Quantization(bits=bits, group_size=32)
        np.testing.assert_array_equal(np.array(tensor.rows(0, rows)), expected)
        np.testing.assert_array_equal(unpacked(tensor, 0, rows), expected)
