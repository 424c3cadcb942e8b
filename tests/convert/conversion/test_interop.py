"""mlx-lm reads what we write and we read what it writes: the same logits, the same greedy tokens."""

from pathlib import Path

import pytest
from gguf_builder import TOKENS
from meta_checkpoint import PARAMS, write_meta, write_tokenizer_model
from tiny_gguf import write_k_quants, write_tiny
from tiny_models import random_weights, tiny_args, write_folder

from convert.conversion.recipe import make_recipe
from convert.conversion.to_mlx import convert
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.model.config import ModelArgs, RopeScaling

import mlx.core as mx
import mlx_lm
from mlx_lm.utils import load_model as peer_load_model

IDS = mx.array([[5, 17, 200, 3, 3, 99, 42, 250, 1, 0, 77, 128]])


def greedy(step, tokens: mx.array, count: int = 12) -> list[int]:
    """Ids that follow `tokens` (1, S), each from a full pass; `step` gives logits (1, S, vocab)."""
    for _ in range(count):
        tokens = mx.concatenate([tokens, mx.argmax(step(tokens)[:, -1:], axis=-1)], axis=1)
    return tokens[0, -count:].tolist()


def same_as_peer(folder: Path, ids: mx.array = IDS) -> None:
    """Logits within 1e-4 of mlx-lm's, and the same greedy tokens. Both compute in float32."""
    ours, (peer, _) = load_model(folder, dtype=mx.float32), peer_load_model(folder)
    peer.set_dtype(mx.float32)
    logits, expected = ours(ids), peer(ids)
    assert mx.abs(expected).max().item() > 0.1
    assert mx.abs(logits - expected).max().item() < 1e-4
    assert greedy(ours, ids) == greedy(peer, ids)


SHAPES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "3.1": {"rope_scaling": RopeScaling(8.0), "rope_theta": 500000.0},
    "3.2": {"rope_scaling": RopeScaling(32.0), "rope_theta": 500000.0, "tie_word_embeddings": True},
    "one KV head": {"n_kv_heads": 1},
    "no groups of heads": {"n_kv_heads": 4},
    "eight to one": {"n_heads": 8, "n_kv_heads": 1, "head_dim": 8},
    "odd vocabulary": {"vocab_size": 331},
    "wide heads": {"head_dim": 32},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_every_shape_of_model(tmp_path, changes):
    args: ModelArgs = tiny_args(**changes)
    convert(write_folder(tmp_path / "in", args, random_weights(args)), tmp_path / "out", progress=False)
    same_as_peer(tmp_path / "out")


@pytest.mark.parametrize("count", [1, 2, 8])
def test_metas_shards(tmp_path, count):
    write_meta(tmp_path / "in", count, use_scaled_rope=True)
    convert(tmp_path / "in", tmp_path / "out", dtype="float32", progress=False)
    same_as_peer(tmp_path / "out")


GGUF_TYPES = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("type_name", GGUF_TYPES)
@pytest.mark.parametrize("options", [{}, {"exact_scales": True}, {"dequantize": True}], ids=["", "exact", "dense"])
def test_ggufs(tmp_path, type_name, options):
    write = write_k_quants if type_name.endswith("_K") else write_tiny
    write(tmp_path / "in.gguf", type_name)
    convert(tmp_path / "in.gguf", tmp_path / "out", progress=False, **options)
    same_as_peer(tmp_path / "out")
    _, tokenizer = mlx_lm.load(str(tmp_path / "out"), lazy=True)
    assert tokenizer.encode("the", add_special_tokens=False) == [TOKENS.index("the")]


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_adapters(tmp_path, name):
    peft = Path(__file__).parents[2] / "data" / "peft"
    recipe = make_recipe(8, group_size=32)
    convert(peft / "base", tmp_path / "out", adapter=peft / name, recipe=recipe, progress=False)
    same_as_peer(tmp_path / "out", IDS % 64)


RECIPES = {
    "2 bits": make_recipe(2, group_size=32),
    "3 bits": make_recipe(3, group_size=32),
    "4 bits": make_recipe(4),
    "5 bits": make_recipe(5, group_size=32),
    "6 bits": make_recipe(6, group_size=32),
    "8 bits": make_recipe(8, group_size=128),
    "dense embedding": make_recipe(4, quantize_embeddings=False),
    "dense head": make_recipe(4, quantize_head=False),
    "mixed": make_recipe(recipe="mixed_4_6"),
    "mxfp4": make_recipe("mxfp4"),
    "mxfp8": make_recipe("mxfp8"),
    "nvfp4": make_recipe("nvfp4"),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_packing(tmp_path, recipe, tied):
    args = tiny_args(dim=128, head_dim=32, hidden_dim=256, n_layers=8, tie_word_embeddings=tied)
    folder = write_folder(tmp_path / "in", args, random_weights(args))
    convert(folder, tmp_path / "out", recipe=recipe, progress=False)
    same_as_peer(tmp_path / "out")


@pytest.fixture
def huggingface(tmp_path) -> Path:
    """A float32 folder with a tokenizer, as mlx-lm's converter wants one."""
    params = PARAMS | {"vocab_size": 556, "n_layers": 4, "use_scaled_rope": True, "multiple_of": 128}
    write_tokenizer_model(write_meta(tmp_path / "meta", params=params) / "tokenizer.model", 300)
    convert(tmp_path / "meta", tmp_path / "huggingface", dtype="float32", progress=False)
    return tmp_path / "huggingface"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantize": True, "q_bits": 4, "q_group_size": 32},
        {"quantize": True, "q_bits": 8, "q_group_size": 64},
        {"quantize": True, "q_mode": "mxfp4"},
        {"quantize": True, "quant_predicate": "mixed_3_6", "q_group_size": 64},
    ],
    ids=["dense", "4 bits", "8 bits", "mxfp4", "mixed"],
)
def test_folders_that_mlx_lm_converts_load_here(tmp_path, huggingface, options):
    mlx_lm.convert(str(huggingface), str(tmp_path / "peer"), **options)
    same_as_peer(tmp_path / "peer")
    convert(tmp_path / "peer", tmp_path / "copy", progress=False)
    same_as_peer(tmp_path / "copy")


@pytest.mark.parametrize(
    "recipe, options",
    [
        (make_recipe(4), {"q_bits": 4, "q_group_size": 64}),
        (make_recipe(6, group_size=32), {"q_bits": 6, "q_group_size": 32}),
        (make_recipe("mxfp4"), {"q_mode": "mxfp4"}),
        (make_recipe(recipe="mixed_4_6"), {"quant_predicate": "mixed_4_6", "q_group_size": 64}),
    ],
    ids=["4 bits", "6 bits", "mxfp4", "mixed"],
)
def test_same_bits_as_mlx_lm(tmp_path, huggingface, recipe, options):
    mlx_lm.convert(str(huggingface), str(tmp_path / "peer"), quantize=True, dtype="float16", **options)
    convert(huggingface, tmp_path / "ours", recipe=recipe, dtype="float16", progress=False)
    ours, peer = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("ours", "peer"))
    assert ours.keys() == peer.keys()
    for name, array in peer.items():
        assert ours[name].dtype == array.dtype and mx.array_equal(ours[name], array).item(), name


def test_tokenizer_of_a_converted_folder_loads_in_mlx_lm(huggingface):
    _, tokenizer = mlx_lm.load(str(huggingface))
    assert tokenizer.decode(tokenizer.encode("a\u00e4\U0001f600", add_special_tokens=False)) == "a\u00e4\U0001f600"
    assert tokenizer.eos_token_ids >= {309}
