"""Three dialects of a model's shape, and what is refused."""

import json
from pathlib import Path

import pytest
from tiny_models import tiny_args

from mlx_llama3.errors import UserError
from mlx_llama3.model.config import ConfigError, RopeScaling, ffn_width, from_hf, from_meta, read_json, to_hf

META = {
    "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "ffn_dim_multiplier": 1.3,
    "multiple_of": 1024, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True,
}  # fmt: skip
HF = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    ("dim", "multiplier", "multiple_of", "width"),
    # The published params.json of 8B, 70B, 405B, 3.2-1B and 3.2-3B.
    [(4096, 1.3, 1024, 14336), (8192, 1.3, 4096, 28672), (16384, 1.2, 4096, 53248), (2048, 1.5, 256, 8192),
     (3072, 1.0, 256, 8192)],
)  # fmt: skip
def test_ffn_width_of_the_published_sizes(dim, multiplier, multiple_of, width):
    assert ffn_width(dim, multiple_of, multiplier) == width


def test_meta_8b():
    args = from_meta(META, source="params.json")
    assert (args.hidden_dim, args.head_dim, args.n_kv_heads, args.max_seq_len) == (14336, 128, 8, 131072)
    assert args.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1, high_freq_factor=4, original_max_position=8192
    )


@pytest.mark.parametrize(
    ("dim", "layers", "heads", "factor"), [(2048, 16, 32, 32), (3072, 28, 24, 32), (8192, 80, 64, 8)]
)
def test_meta_scaling_factor_by_size(dim, layers, heads, factor):
    params = META | {"dim": dim, "n_layers": layers, "n_heads": heads}
    assert from_meta(params, source="params.json").rope_scaling.factor == factor
    assert from_meta(params, source="params.json", rope_factor=16).rope_scaling.factor == 16


def test_meta_3_0_has_no_scaling_and_8k_positions():
    args = from_meta(META | {"use_scaled_rope": False}, source="params.json")
    assert (args.rope_scaling, args.max_seq_len) == (None, 8192)


def test_meta_vocabulary_from_the_embedding():
    params = META | {"vocab_size": -1}
    assert from_meta(params, source="params.json", vocab_size=128256).vocab_size == 128256
    with pytest.raises(ConfigError, match="vocab_size"):
        from_meta(params, source="params.json")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_experts": 8}, "n_experts"),
        ({"vision_chunk_size": 560}, "vision"),
        ({"quantization_args": {"spinquant": True}}, "quantization_args"),
        ({"lora_args": {"rank": 16}}, "lora_args"),
        ({"rope_theta": None}, "rope_theta"),
        ({"norm_eps": None}, "norm_eps"),
        ({"n_heads": 33}, "n_heads"),
        ({"n_kv_heads": 5}, "n_kv_heads"),
        ({"dim": 4096.5}, "dim"),
        ({"n_kv_heads": 0}, "n_kv_heads"),
        ({"use_scaled_rope": "false"}, "use_scaled_rope is 'false'; it must be true or false"),
        ({"ffn_dim_multiplier": "1.3"}, "ffn_dim_multiplier"),
        ({"multiple_of": 0}, "multiple_of"),
    ],
)
def test_meta_refuses(change, named):
    with pytest.raises(ConfigError, match=named) as refused:
        from_meta(META | change, source="params.json")
    assert str(refused.value).startswith("params.json: ")


def test_hf_old_and_new_dialect_agree():
    old = from_hf(HF | {"rope_theta": 500000.0, "rope_scaling": LLAMA3}, source="config.json")
    new = from_hf(HF | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}, source="config.json")
    assert old == new
    assert (old.rope_theta, old.rope_scaling.factor) == (500000.0, 32.0)


def test_hf_theta_inside_rope_parameters_is_found():
    """transformers 5 writes only this; readers that fall back to 10000 go wrong after a thousand tokens."""
    args = from_hf(HF | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, source="config.json")
    assert (args.rope_theta, args.rope_scaling) == (500000.0, None)


def test_hf_written_config_reads_back_in_each_dialect_alone():
    for args in (tiny_args(), tiny_args(rope_scaling=RopeScaling(8.0), tie_word_embeddings=True, head_dim=32)):
        config = to_hf(args)
        old = {k: v for k, v in config.items() if k != "rope_parameters"}
        new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
        assert from_hf(config, source="c") == from_hf(old, source="c") == from_hf(new, source="c") == args


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "qwen2"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 10000.0}}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"factor": 8.0}}, "contradict"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"residual_multiplier": 0.22}, "residual_multiplier"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"hidden_size": None}, "hidden_size"),
        ({"head_dim": 63}, "head_dim"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 30.0}, "num_hidden_layers is 30.0; it must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 5}, "n_heads 32 is not a multiple of n_kv_heads 5"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"hidden_size": 10**12}, "hidden_size"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a finite number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": "large"}, "rope_theta"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({"layer_types": 5}, "layer_types"),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "factor"),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            "high_freq_factor 1.0 must be above low_freq_factor 1.0",
        ),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_hf_refuses(change, named):
    with pytest.raises(ConfigError, match=named) as refused:
        from_hf(HF | {"rope_theta": 500000.0} | change, source="config.json")
    assert str(refused.value).startswith("config.json: ")


ODD = [True, 0, -1, 2.5, float("nan"), 10**400, "x", "", [], [None], {}, {"type": "x"}]


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:12])
def test_whatever_a_key_holds_there_is_an_error_in_one_line_or_a_model(value):
    hf = to_hf(tiny_args(rope_scaling=RopeScaling(8.0))) | {"layer_types": ["full_attention"]}
    changed = [(from_hf, hf | {key: value}) for key in hf]
    for group in ("rope_scaling", "rope_parameters"):
        changed += [(from_hf, hf | {group: hf[group] | {key: value}}) for key in hf[group]]
    changed += [(from_meta, META | {key: value}) for key in META]
    refused = 0
    for read, config in changed:
        try:
            read(config, source="c")
        except ConfigError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > len(changed) / 2


def test_hf_harmless_unknown_key_is_told(caplog):
    from_hf(HF | {"rope_theta": 500000.0, "favourite_colour": "blue"}, source="config.json")
    assert "favourite_colour" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "\xff"])
def test_read_json_names_the_file(tmp_path: Path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="config.json"):
        read_json(path)
    with pytest.raises(UserError, match="no such file"):
        read_json(tmp_path / "absent.json")


def test_read_json(tmp_path: Path):
    (tmp_path / "a.json").write_text(json.dumps({"x": 1}))
    assert read_json(tmp_path / "a.json") == {"x": 1}
