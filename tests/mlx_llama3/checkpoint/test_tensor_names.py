"""The name table, in every direction."""

from tiny_models import tiny_args

from mlx_llama3.checkpoint.tensor_names import gguf_to_hf, hf_to_gguf, hf_to_official, official_to_hf
from mlx_llama3.checkpoint.tensor_shapes import expected_shapes


def test_known_triples():
    triples = [
        ("tok_embeddings.weight", "model.embed_tokens.weight", "token_embd.weight"),
        ("layers.3.attention.wq.weight", "model.layers.3.self_attn.q_proj.weight", "blk.3.attn_q.weight"),
        ("layers.12.feed_forward.w2.weight", "model.layers.12.mlp.down_proj.weight", "blk.12.ffn_down.weight"),
        ("layers.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
        ("output.weight", "lm_head.weight", "output.weight"),
    ]
    for official, hf, gguf in triples:
        assert (official_to_hf(official), hf_to_official(hf)) == (hf, official)
        assert (gguf_to_hf(gguf), hf_to_gguf(hf)) == (hf, gguf)


def test_every_tensor_of_a_model_goes_there_and_back():
    for name in expected_shapes(tiny_args()):
        assert official_to_hf(hf_to_official(name)) == name
        assert gguf_to_hf(hf_to_gguf(name)) == name


def test_unknown_names():
    for name in ("rope.freqs", "layers.3.attention.wz.weight", "blk.1.attn_q.bias", "layers.x.ffn_norm.weight", ""):
        assert official_to_hf(name) is None
        assert gguf_to_hf(name) is None


def test_shapes_of_8b():
    args = tiny_args(dim=4096, n_layers=1, n_heads=32, n_kv_heads=8, head_dim=128, hidden_dim=14336, vocab_size=128256)
    shapes = expected_shapes(args)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (1024, 4096)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (4096, 14336)
    assert shapes["lm_head.weight"] == (128256, 4096)
    assert "lm_head.weight" not in expected_shapes(tiny_args(tie_word_embeddings=True))
