"""The Transformer against a float64 NumPy version of Meta's code, and its invariants."""

import numpy as np
import pytest
from tiny_models import ARGS, random_weights, tiny_args, tiny_model

from mlx_llama3.model.config import ModelArgs, RopeScaling
from mlx_llama3.model.layers.rope import inv_freq_of

import mlx.core as mx

TOKENS = mx.array([[3, 14, 159, 26, 5, 35, 89, 79], [7, 0, 319, 1, 1, 2, 6, 8]])


def reference_logits(weights: dict[str, np.ndarray], args: ModelArgs, tokens: np.ndarray) -> np.ndarray:
    """The logits of a full causal pass in float64, head by head, with separate matrices."""
    w = {name: np.array(value, dtype=np.float64) for name, value in weights.items()}
    length = tokens.shape[1]
    angles = np.arange(length)[:, None] * np.array(inv_freq_of(args), dtype=np.float64)
    half = args.head_dim // 2

    def norm(x, gain):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + args.norm_eps) * gain

    def rotate(x):  # (B, S, head_dim)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(args.n_layers):
        p = f"model.layers.{i}."
        n = norm(x, w[p + "input_layernorm.weight"])
        heads = []
        for head in range(args.n_heads):
            kv = head // (args.n_heads // args.n_kv_heads)
            rows, kv_rows = (slice(h * args.head_dim, (h + 1) * args.head_dim) for h in (head, kv))
            q = rotate(n @ w[p + "self_attn.q_proj.weight"][rows].T)
            k = rotate(n @ w[p + "self_attn.k_proj.weight"][kv_rows].T)
            scores = q @ k.swapaxes(-1, -2) / np.sqrt(args.head_dim)
            scores = np.where(np.tril(np.ones((length, length))) > 0, scores, -np.inf)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(scores / scores.sum(-1, keepdims=True) @ (n @ w[p + "self_attn.v_proj.weight"][kv_rows].T))
        h = x + np.concatenate(heads, -1) @ w[p + "self_attn.o_proj.weight"].T
        n = norm(h, w[p + "post_attention_layernorm.weight"])
        gate = n @ w[p + "mlp.gate_proj.weight"].T
        x = h + (gate / (1 + np.exp(-gate)) * (n @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if args.tie_word_embeddings else "lm_head.weight"]
    return norm(x, w["model.norm.weight"]) @ head.T


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 4},
        {"n_kv_heads": 1},
        {"tie_word_embeddings": True},
        {"head_dim": 32},
        {"vocab_size": 77},
        {"rope_scaling": RopeScaling(32.0), "rope_theta": 500000.0},
    ],
    ids=str,
)
def test_logits_against_float64(tmp_path, changes):
    args = tiny_args(**changes)
    tokens = TOKENS % args.vocab_size
    expected = reference_logits(random_weights(args), args, np.array(tokens))
    logits = np.array(tiny_model(tmp_path, args)(tokens))
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.parametrize("chunks", [[8], [1] * 8, [5, 1, 2], [3, 5]])
def test_incremental_equals_full_pass(tmp_path, chunks):
    model = tiny_model(tmp_path)
    full, cache, start, parts = model(TOKENS), model.make_cache(), 0, []
    for length in chunks:
        parts.append(model(TOKENS[:, start : start + length], start, cache))
        start += length
    assert mx.abs(mx.concatenate(parts, axis=1) - full).max().item() < 1e-5


def test_a_trimmed_cache_can_be_extended(tmp_path):
    model = tiny_model(tmp_path)
    cache = model.make_cache()
    model(TOKENS, 0, cache)
    for entry in cache:
        entry.trim(3)
    again = model(TOKENS[:, 5:], 5, cache)
    assert mx.abs(again - model(TOKENS)[:, 5:]).max().item() < 1e-5


def test_start_pos_must_match_the_cache(tmp_path):
    model = tiny_model(tmp_path)
    cache = model.make_cache()
    model(TOKENS, 0, cache)
    for start in (0, 7, 9):
        with pytest.raises(ValueError, match="start_pos"):
            model(TOKENS[:, :1], start, cache)
    with pytest.raises(ValueError, match="start_pos"):
        model(TOKENS, 4)
    with pytest.raises(ValueError, match="shape"):
        model(TOKENS[0])


def test_official_names_and_no_biases(tmp_path):
    model = tiny_model(tmp_path)
    block = model.layers[0]
    assert block.attention_norm.weight is not block.ffn_norm.weight
    assert "bias" not in block.attention.wo and "bias" not in block.feed_forward.w2
    assert [part.weight.shape for part in block.attention.wqkv.parts] == [((4 + 2 + 2) * 16, ARGS.dim)]
    assert [part.weight.shape for part in block.feed_forward.w13.parts] == [(2 * ARGS.hidden_dim, ARGS.dim)]
