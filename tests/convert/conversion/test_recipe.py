"""Recipes: which matrix gets quantization many bits, by name, by JSON and from the options."""

import json

import pytest
from tiny_models import tiny_args

from convert.conversion.recipe import NAMES, Recipe, make_recipe
from mlx_llama3.checkpoint.config_json import to_hf
from mlx_llama3.checkpoint.quantization import Quantization
from mlx_llama3.checkpoint.tensor_shapes import expected_shapes
from mlx_llama3.errors import UserError

import mlx.nn as nn
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.models.llama import Model, ModelArgs as PeerArgs

LAYERS = 16
SHAPE = (256, 256)


def layer(n: int, matrix: str) -> str:
    return f"model.layers.{n}.{matrix}.weight"


def bits(recipe: Recipe, name: str, shape=SHAPE) -> int | None:
    quantization = recipe.quantization(name, shape, LAYERS)
    return quantization.bits if quantization else None


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_one_setting_for_all(count, size):
    recipe = make_recipe(count, group_size=size)
    for name in ("model.embed_tokens.weight", layer(3, "mlp.down_proj"), "lm_head.weight"):
        assert recipe.quantization(name, SHAPE, LAYERS) == Quantization(count, size)
    assert recipe.quantization("model.norm.weight", (256,), LAYERS) is None
    assert recipe.quantization(layer(0, "mlp.up_proj"), (256, 48), LAYERS) is None


@pytest.mark.parametrize("mode, count, size", [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_modes(mode, count, size):
    recipe = make_recipe(mode)
    assert recipe.quantization("lm_head.weight", SHAPE, LAYERS) == Quantization(count, size, mode)
    assert make_recipe(mode, group_size=size) == recipe


def test_embeddings_and_head_may_stay_dense():
    recipe = make_recipe("4", quantize_embeddings=False)
    assert bits(recipe, "model.embed_tokens.weight") is None and bits(recipe, "lm_head.weight") == 4
    recipe = make_recipe("4", quantize_head=False)
    assert bits(recipe, "model.embed_tokens.weight") == 4 and bits(recipe, "lm_head.weight") is None


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mixed_4_8"])
@pytest.mark.parametrize("layers", [2, 16, 28, 32])
def test_named_recipes_choose_as_mlx_lm_does(name, layers):
    args = tiny_args(n_layers=layers)
    peer_model = Model(PeerArgs.from_dict(to_hf(args)))
    predicate = mixed_quant_predicate_builder(name, peer_model)
    recipe = make_recipe(recipe=name)
    for tensor, shape in expected_shapes(args).items():
        if len(shape) == 2 and shape[1] % 64 == 0:
            ours = recipe.quantization(tensor, shape, layers)
            expected = predicate(tensor.removesuffix(".weight"), nn.Linear(1, 1))
            assert {"group_size": ours.group_size, "bits": ours.bits, "mode": ours.mode} == expected


def read(tmp_path, table) -> Recipe:
    (tmp_path / "mine.json").write_text(json.dumps(table))
    return make_recipe(recipe=tmp_path / "mine.json")


def test_json_recipe(tmp_path):
    recipe = read(
        tmp_path,
        {
            "bits": 4,
            "group_size": 32,
            "overrides": [
                {"tensors": ["w2", "wv"], "layers": "outer", "bits": 6},
                {"tensors": ["output"], "bits": 8, "group_size": 64},
                {"layers": [0, -1], "bits": 8},
                {"tensors": ["tok_embeddings"], "bits": None},
                {"tensors": ["wo"], "layers": [5], "mode": "mxfp4"},
            ],
        },
    )
    assert recipe.name == "mine"
    assert recipe.quantization(layer(5, "mlp.up_proj"), SHAPE, LAYERS) == Quantization(4, 32)
    # Of 16 layers the outer ones are 0, 1, 14, 15 and every third between.
    chosen = [n for n in range(LAYERS) if bits(recipe, layer(n, "mlp.down_proj")) != 4]
    assert chosen == [0, 1, 4, 7, 10, 13, 14, 15]
    assert [bits(recipe, layer(n, "mlp.down_proj")) for n in (0, 1, 14, 15)] == [8, 6, 6, 8]
    assert bits(recipe, layer(0, "self_attn.q_proj")) == bits(recipe, layer(15, "self_attn.q_proj")) == 8
    assert recipe.quantization("lm_head.weight", SHAPE, LAYERS) == Quantization(8, 64)
    assert bits(recipe, "model.embed_tokens.weight") is None
    assert recipe.quantization(layer(5, "self_attn.o_proj"), SHAPE, LAYERS) == Quantization(4, 32, "mxfp4")


def test_mode_as_the_default_of_a_json_recipe(tmp_path):
    recipe = read(tmp_path, {"mode": "mxfp4", "overrides": [{"tensors": ["wv"], "bits": 8}]})
    assert recipe.default == Quantization(4, 32, "mxfp4")
    assert recipe.quantization(layer(0, "self_attn.v_proj"), SHAPE, LAYERS) == Quantization(8, 64)


@pytest.mark.parametrize(
    "table, named",
    [
        ({}, "mine.json: None is not one of 2, 3, 4, 5, 6, 8, mxfp4"),
        ({"bits": 7}, "7 is not one of"),
        ({"bits": True}, "True is not one of"),
        ({"bits": 4, "group_size": 48}, "a group size of 48; MLX has 32, 64, 128"),
        ({"mode": "mxfp4", "group_size": 64}, "mxfp4 has groups of 32, not of 64"),
        ({"bits": 4, "colour": 1}, "unknown key 'colour'"),
        ({"bits": 4, "overrides": {}}, "overrides must be a list"),
        ({"bits": 4, "overrides": [{"tensors": ["w2"]}]}, "override 1: gives no bits"),
        ({"bits": 4, "overrides": [{"bits": 6}, {"bits": 6, "tensors": ["w9"]}]}, "override 2: tensors must be"),
        ({"bits": 4, "overrides": [{"bits": 6, "tensors": "w2"}]}, "override 1: tensors must be"),
        ({"bits": 4, "overrides": [{"bits": 6, "layers": "inner"}]}, "override 1: layers must be"),
        ({"bits": 4, "overrides": [{"bits": 6, "layers": [1.5]}]}, "override 1: layers must be"),
        ({"bits": 4, "overrides": [{"bits": 6, "layer": [1]}]}, "override 1: unknown key 'layer'"),
    ],
)
def test_json_that_makes_no_sense(tmp_path, table, named):
    with pytest.raises(UserError) as error:
        read(tmp_path, table)
    assert named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"quantize": "7"}, "'7' is not one of"),
        ({"quantize": "int4"}, "'int4' is not one of"),
        ({"quantize": 4, "group_size": 16}, "a group size of 16"),
        ({"quantize": "mxfp8", "group_size": 64}, "mxfp8 has groups of 32"),
        ({"quantize": 4, "recipe": "mixed_4_6"}, "give one of them"),
        ({"group_size": 64}, "--group-size says how to quantize"),
        ({"recipe": "mixed_1_2"}, "no such file, and none of the names mixed_2_6"),
    ],
)
def test_options_that_make_no_sense(options, named):
    with pytest.raises(UserError, match=named):
        make_recipe(**options)


def test_no_options_no_recipe():
    assert make_recipe() is None
