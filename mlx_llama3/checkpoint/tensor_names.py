"""The tensor names in three schemes: Meta's (in the code), Hugging Face's (on disk) and GGUF's."""

import re

# Meta's ("official") name, Hugging Face's, GGUF's; `{}` is the layer number.
_TABLE = (
    ("tok_embeddings.weight", "model.embed_tokens.weight", "token_embd.weight"),
    ("layers.{}.attention_norm.weight", "model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"),
    ("layers.{}.attention.wq.weight", "model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight"),
    ("layers.{}.attention.wk.weight", "model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight"),
    ("layers.{}.attention.wv.weight", "model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight"),
    ("layers.{}.attention.wo.weight", "model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight"),
    ("layers.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"),
    ("layers.{}.feed_forward.w1.weight", "model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight"),
    ("layers.{}.feed_forward.w2.weight", "model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight"),
    ("layers.{}.feed_forward.w3.weight", "model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight"),
    ("norm.weight", "model.norm.weight", "output_norm.weight"),
    ("output.weight", "lm_head.weight", "output.weight"),
)
_OFFICIAL, _HF, _GGUF = 0, 1, 2
_MAPS = {(a, b): {row[a]: row[b] for row in _TABLE} for a in range(3) for b in range(3)}


def _translate(name: str, scheme: int, to: int) -> str | None:
    layer = re.search(r"(?<=\.)\d+(?=\.)", name)
    pattern = name if layer is None else f"{name[: layer.start()]}{{}}{name[layer.end() :]}"
    translated = _MAPS[scheme, to].get(pattern)
    return translated if translated is None or layer is None else translated.format(layer.group())


def official_to_hf(name: str) -> str | None:
    """`layers.3.attention.wq.weight` -> `model.layers.3.self_attn.q_proj.weight`, None for an unknown name."""
    return _translate(name, _OFFICIAL, _HF)


def hf_to_official(name: str) -> str | None:
    """`model.layers.3.self_attn.q_proj.weight` -> `layers.3.attention.wq.weight`, None for an unknown name."""
    return _translate(name, _HF, _OFFICIAL)


def gguf_to_hf(name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`, None for an unknown name."""
    return _translate(name, _GGUF, _HF)


def hf_to_gguf(name: str) -> str | None:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`, None for an unknown name."""
    return _translate(name, _HF, _GGUF)
