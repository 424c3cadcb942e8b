"""The quantization of a module as mlx-lm reads it; and what another program has left in config.json."""

import pytest
from tiny_models import quantized, random_weights, tiny_args, write_folder

from convert.sources.open import open_source
from mlx_llama3.checkpoint.folder import Checkpoint
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.checkpoint.quantization import Quantization, module_quantization, quantization_settings
from mlx_llama3.errors import UserError

import mlx.core as mx
from mlx_lm.utils import load_model as mlx_lm_load

ARGS = tiny_args(dim=128, hidden_dim=128)
WEIGHTS = random_weights(ARGS)
NULL = {"bits": None, "group_size": None}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"bits": 6, "group_size": 32}, Quantization(6, 32)),
        ({"bits": 6, "group_size": None, "mode": None}, Quantization(6, 64)),
        ({"mode": "nvfp4", **NULL}, Quantization(4, 16, "nvfp4")),
        ({"mode": "mxfp8"}, Quantization(8, 32, "mxfp8")),
        ({"bits": 4, "group_size": 32, "m": {"bits": 6, "group_size": None}}, Quantization(6, 64)),
        ({"mode": "mxfp4", **NULL, "m": {"bits": 8}}, Quantization(8, 64)),
        ({"bits": 3, "group_size": 128, "m": True}, Quantization(3, 128)),
    ],
)
def test_what_is_absent_or_null_has_mlx_default(settings, expected):
    assert module_quantization(settings, "m", "config.json") == expected


def test_a_folder_of_mlx_lm_with_null_group_sizes_runs_as_there(tmp_path):
    """What `mlx_lm.convert --quant-predicate mixed_3_6` writes."""
    packed = quantized(WEIGHTS, bits=3, group_size=64)
    high = [name for name in WEIGHTS if name.endswith(("v_proj.weight", "down_proj.weight"))]
    packed |= quantized({name: WEIGHTS[name] for name in high}, bits=6, group_size=64)
    modules = [name.removesuffix(".weight") for name, weight in WEIGHTS.items() if weight.ndim == 2]
    own = {m: {"group_size": None, "bits": 6 if f"{m}.weight" in high else 3, "mode": "affine"} for m in modules}
    settings = {"group_size": 64, "bits": 4, "mode": "affine", **own}
    folder = write_folder(tmp_path, ARGS, packed, quantization=settings)
    tokens = mx.array([[1, 2, 3]])
    theirs = mlx_lm_load(folder)[0](tokens).astype(mx.float32)
    assert mx.abs(load_model(folder, dtype=mx.float32)(tokens) - theirs).max().item() < 1e-4
    tensors = open_source(folder).tensors
    assert tensors[high[0]].quantization == Quantization(6, 64)


FOREIGN = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def test_a_left_over_quantization_config_of_a_dense_model_is_ignored(tmp_path):
    folder = write_folder(tmp_path, ARGS, WEIGHTS, quantization_config=FOREIGN)
    assert Checkpoint(folder).n_weights and open_source(folder).tensors.keys() == WEIGHTS.keys()
    names = ["model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight.absmax"]
    with pytest.raises(UserError, match="quantized with 'bitsandbytes', which MLX cannot read"):
        quantization_settings({"quantization_config": FOREIGN}, names, "config.json")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_a_prefixed_name_is_shown(tmp_path, prefix):
    folder = write_folder(tmp_path, ARGS, {f"{prefix}{name}": weight for name, weight in WEIGHTS.items()})
    for read in (Checkpoint, open_source):
        with pytest.raises(
            UserError, match=f"is named {prefix}model.embed_tokens.weight here; save .* without"
        ) as said:
            read(folder)
        assert "download" not in str(said.value)
