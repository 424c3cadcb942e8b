"""Meta's params.json: the published sizes, and what is refused."""

import pytest

from convert.sources.params_json import ffn_width, from_meta
from mlx_llama3.model.config import ConfigError, RopeScaling

META = {
    "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "ffn_dim_multiplier": 1.3,
    "multiple_of": 1024, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True,
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


ODD = [True, 0, -1, 2.5, float("nan"), 10**400, "x", "", [], [None], {}, {"type": "x"}]


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:12])
def test_whatever_a_key_holds_there_is_an_error_in_one_line_or_a_model(value):
    refused = 0
    for key in META:
        try:
            from_meta(META | {key: value}, source="c")
        except ConfigError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > len(META) / 2
