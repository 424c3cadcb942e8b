"""`ModelArgs` from GGUF metadata: every key is read, every unsupported value is named in the error."""

import numpy as np
import pytest
from gguf_builder import Typed, encoded, gguf_bytes

from convert.gguf.config import args_from_gguf
from convert.gguf.split_files import read_gguf
from mlx_llama3.errors import UserError
from mlx_llama3.model.config import ModelArgs, RopeScaling

LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 8192,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
}
ARGS = ModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=96, vocab_size=40, norm_eps=1e-5,
    rope_theta=500000.0, max_seq_len=8192, tie_word_embeddings=True,
)  # fmt: skip
EMBEDDING = encoded("token_embd.weight", np.zeros((40, 64)))
HEAD = encoded("output.weight", np.zeros((40, 64)))


@pytest.fixture
def read(tmp_path):
    def read(changes=None, tensors=(EMBEDDING, HEAD), without=()):
        metadata = {key: value for key, value in (LLAMA | (changes or {})).items() if key not in without}
        path = tmp_path / "model.gguf"
        path.write_bytes(gguf_bytes(metadata, tensors))
        model = read_gguf(path)
        return args_from_gguf(model.metadata, model.tensors, "file.gguf")

    return read


def changed(**fields) -> ModelArgs:
    return ModelArgs(**{**vars(ARGS), "tie_word_embeddings": False, **fields})


def test_metadata_become_args(read):
    args, notes = read()
    assert args == changed()
    assert notes == []


def test_no_head_means_tied(read):
    norm = encoded("output_norm.weight", np.zeros(64))
    assert read(tensors=(EMBEDDING, norm))[0] == ARGS


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"llama.rope.dimension_count": 16, "llama.vocab_size": 40}, {}),
        ({"llama.attention.key_length": 32, "llama.attention.value_length": 32}, {"head_dim": 32}),
        ({"llama.rope.dimension_count": 8}, {"head_dim": 8}),
        ({"llama.attention.head_count_kv": Typed(9, (5, [2, 2]))}, {}),
        ({"llama.expert_count": 0, "llama.attention.scale": 0.0, "llama.logit_scale": 1.0}, {}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {}),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, {}),
    ],
)
def test_optional_keys(read, changes, fields):
    assert read(changes)[0] == changed(**fields)


def test_every_head_has_its_own_kv_head_by_default(read):
    assert read(without=("llama.attention.head_count_kv",))[0] == changed(n_kv_heads=4)


@pytest.mark.parametrize("key", [key for key in LLAMA if key != "llama.attention.head_count_kv"])
def test_missing_keys_are_named(read, key):
    with pytest.raises(UserError, match=f"file.gguf: metadata key '{key}' is missing"):
        read(without=(key,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "qwen2"}, "architecture is 'qwen2'; only models of architecture 'llama'"),
        ({"llama.embedding_length": "64"}, "'llama.embedding_length' is '64', expected a whole number"),
        ({"llama.embedding_length": 0}, "'llama.embedding_length' is 0"),
        ({"llama.embedding_length": True}, "'llama.embedding_length' is True"),
        ({"llama.embedding_length": 66}, "'llama.attention.key_length' is missing.*66 is not a multiple of 4"),
        ({"llama.attention.head_count": Typed(9, (5, [4, 2]))}, r"head_count' is \[4, 2\]"),
        ({"llama.attention.head_count_kv": 3}, "file.gguf: n_heads 4 is not a multiple of n_kv_heads 3"),
        ({"llama.rope.freq_base": -1.0}, "'llama.rope.freq_base' is -1.0, expected a positive number"),
        ({"llama.rope.freq_base": float("nan")}, "'llama.rope.freq_base' is nan"),
        ({"llama.rope.freq_base": float("inf")}, "'llama.rope.freq_base' is inf"),
        ({"llama.block_count": 2**31}, "block_count is 2147483648, but there are only 2 tensors"),
        ({"llama.vocab_size": 41}, "vocab_size is 41, but token_embd.weight has 40 rows"),
        ({"llama.attention.key_length": 32, "llama.rope.dimension_count": 16}, "must be equal"),
        ({"llama.expert_count": 8}, "expert_count is 8: this model is not of the Llama 3 architecture"),
        ({"llama.attention.sliding_window": 4096}, "sliding_window is 4096"),
        ({"llama.attention.scale": 1.0}, "attention.scale is 1.0"),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            "scaling.type' is 'linear'.*not supp",
        ),
        ({"llama.rope.scaling.type": "yarn"}, "scaling.type' is 'yarn'"),
        ({"llama.rope.scale_linear": 2.0}, "scaling.type' is missing.*not supported"),
    ],
)
def test_strange_values_are_named(read, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        read(changes)
    assert "\n" not in str(caught.value)


def test_no_embedding(read):
    with pytest.raises(UserError, match="'token_embd.weight' is missing"):
        read(tensors=(HEAD, encoded("output_norm.weight", np.zeros(64))))


def test_rope_factors_give_the_scaling(read):
    # The wavelengths of a head of 16 at base 500000; one of them, 4,450 positions, is between 2048 and 8192.
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(8) / 8)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = encoded("rope_freqs.weight", 1 / ((1 - smooth) / 8 + smooth))
    assert read(tensors=(EMBEDDING, HEAD, factors))[0] == changed(rope_scaling=RopeScaling(8.0))
    ones = encoded("rope_freqs.weight", np.ones(8))
    assert read(tensors=(EMBEDDING, HEAD, ones))[0] == changed()
    half = encoded("rope_freqs.weight", np.ones((8, 32)), "F16")
    with pytest.raises(UserError, match="'rope_freqs.weight' is F16"):
        read(tensors=(EMBEDDING, HEAD, half))


@pytest.mark.parametrize(
    ("dim", "layers", "factor"), [(64, 2, 8.0), (2048, 16, 32.0), (3072, 28, 32.0), (2048, 22, 8.0)]
)
def test_an_early_file_of_llama_31_has_its_scaling_computed(read, dim, layers, factor):
    padding = [encoded(f"layer {i}", np.zeros(1)) for i in range(layers)]
    embedding = encoded("token_embd.weight", np.zeros((40, dim)), "Q4_0")
    changes = {"llama.context_length": 131072, "llama.embedding_length": dim, "llama.block_count": layers}
    args, notes = read(changes, tensors=(embedding, *padding))
    assert args.rope_scaling == RopeScaling(factor)
    assert len(notes) == 1 and f"factor {factor:g}" in notes[0]


def test_scaling_from_metadata(read):
    changes = {
        "llama.rope.scaling.type": "llama3", "llama.rope.scaling.factor": 16.0,
        "llama.rope.scaling.original_context_length": 4096,
    }  # fmt: skip
    assert read(changes)[0].rope_scaling == RopeScaling(16.0, original_max_position=4096)


def test_demo(demo_gguf):
    model = read_gguf(demo_gguf)
    args, notes = args_from_gguf(model.metadata, model.tensors, "demo")
    assert args == ModelArgs(
        dim=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, hidden_dim=1536, vocab_size=49152,
        norm_eps=1e-5, rope_theta=100000.0, max_seq_len=8192, tie_word_embeddings=True,
    )  # fmt: skip
    assert notes == []
