"""The names and shapes of a model's tensors, from its `ModelArgs`."""

from math import prod

from mlx_llama3.model.config import ModelArgs


def count_weights(args: ModelArgs) -> int:
    """The number of weights of a model; a tied head is not counted again."""
    return sum(prod(shape) for shape in expected_shapes(args).values())


def expected_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> dense shape of every tensor, in the order of the forward pass; no head if it is tied."""
    q_rows, kv_rows = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (args.vocab_size, args.dim)}
    for i in range(args.n_layers):
        layer = {
            "input_layernorm": (args.dim,),
            "self_attn.q_proj": (q_rows, args.dim),
            "self_attn.k_proj": (kv_rows, args.dim),
            "self_attn.v_proj": (kv_rows, args.dim),
            "self_attn.o_proj": (args.dim, q_rows),
            "post_attention_layernorm": (args.dim,),
            "mlp.gate_proj": (args.hidden_dim, args.dim),
            "mlp.up_proj": (args.hidden_dim, args.dim),
            "mlp.down_proj": (args.dim, args.hidden_dim),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (args.dim,)
    if not args.tie_word_embeddings:
        shapes["lm_head.weight"] = (args.vocab_size, args.dim)
    return shapes
