"""Hugging Face's config.json in both of its dialects, and the configurations that are refused."""

import pytest
from tiny_models import tiny_args

from mlx_llama3.checkpoint.config_json import from_hf, to_hf
from mlx_llama3.model.config import ConfigError, RopeScaling

HF = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_hf_old_and_new_dialect_agree():
    old = from_hf(HF | {"rope_theta": 500000.0, "rope_scaling": LLAMA3}, source="config.json")
    new = from_hf(HF | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}, source="config.json")
    assert old == new
    assert (old.rope_theta, old.rope_scaling.factor) == (500000.0, 32.0)


def test_hf_theta_inside_rope_parameters_is_read():
    """transformers 5 writes only this. Readers that fall back to 10000 give wrong answers after a thousand tokens."""
    args = from_hf(HF | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, source="config.json")
    assert (args.rope_theta, args.rope_scaling) == (500000.0, None)


def test_hf_written_config_reads_back_in_each_dialect_alone():
    for args in (tiny_args(), tiny_args(rope_scaling=RopeScaling(8.0), tie_word_embeddings=True, head_dim=32)):
        config = to_hf(args)
        old = {k: v for k, v in config.items() if k != "rope_parameters"}
        new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
        assert from_hf(config, source="c") == from_hf(old, source="c") == from_hf(new, source="c") == args


@pytest.mark.parametrize(
    ("change", "message"),
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
        ({"num_hidden_layers": 30.5}, "num_hidden_layers is 30.5; it must be a whole number"),
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
def test_hf_refuses(change, message):
    with pytest.raises(ConfigError, match=message) as refused:
        from_hf(HF | {"rope_theta": 500000.0} | change, source="config.json")
    assert str(refused.value).startswith("config.json: ")


ODD = [True, 0, -1, 2.5, float("nan"), 10**400, "x", "", [], [None], {}, {"type": "x"}]


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:12])
def test_any_value_of_a_key_gives_a_one_line_error_or_a_model(value):
    hf = to_hf(tiny_args(rope_scaling=RopeScaling(8.0))) | {"layer_types": ["full_attention"]}
    changed = [hf | {key: value} for key in hf]
    for group in ("rope_scaling", "rope_parameters"):
        changed += [hf | {group: hf[group] | {key: value}} for key in hf[group]]
    refused = 0
    for config in changed:
        try:
            from_hf(config, source="c")
        except ConfigError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > len(changed) / 2


def test_hf_harmless_unknown_key_is_logged(caplog):
    from_hf(HF | {"rope_theta": 500000.0, "favourite_colour": "blue"}, source="config.json")
    assert "favourite_colour" in caplog.text


@pytest.mark.parametrize(
    "key",
    [
        "_flash_attn_2_enabled", "use_flash_attention_2", "use_flash_attn", "use_sdpa", "attn_pdrop",
        "use_fused_rms_norm", "use_memory_efficient_attention", "attention_probs_dropout_prob",
    ],
)  # fmt: skip
def test_keys_about_how_attention_is_computed_are_harmless(key):
    plain = HF | {"rope_theta": 500000.0}
    assert from_hf(plain | {key: True}, source="c") == from_hf(plain, source="c")


def test_whole_numbers_may_be_written_as_floats():
    plain = HF | {"rope_theta": 500000.0, "rope_scaling": LLAMA3}
    floats = {key: float(value) if type(value) is int else value for key, value in plain.items()}
    floats["rope_scaling"] = LLAMA3 | {"original_max_position_embeddings": 8192.0}
    args = from_hf(floats, source="c")
    assert args == from_hf(plain, source="c") and type(args.max_seq_len) is int
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        from_hf(plain | {"max_position_embeddings": 2048.5}, source="c")
