"""Models for the ledger, with published widths and any number of layers, which all share one layer's weights (zeros).

Both this project's model and mlx-lm's llama: 4 bits in groups of 64, bfloat16, with a partly filled cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx_llama3  # first: it puts a fast BLAS in place before MLX is loaded  # noqa: F401
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.config import ModelArgs, RopeScaling
from mlx_llama3.model.kernels.kernel_set import Kernels
from mlx_llama3.model.layers.packed_linear import PackedLinear
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx
import mlx.nn as nn

VOCAB = 64
GROUP, BITS = 64, 4


@dataclass(frozen=True)
class Widths:
    """The widths of a published model: dim, hidden_dim, query heads, KV heads, head_dim."""

    dim: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


WIDTHS = {
    "demo": Widths(576, 1536, 9, 3, 64),
    "1B": Widths(2048, 8192, 32, 8, 64),
    "3B": Widths(3072, 8192, 24, 8, 128),
    "8B": Widths(4096, 14336, 32, 8, 128),
}


def ours(widths: Widths, n_layers: int, kernels: Kernels, *, compiles: bool = False) -> Transformer:
    """This project's model as it runs on a GPU: RoPE by `mx.fast.rope` or the kernel, without a table of sines.

    compiles: whether decoding runs compiled blocks.
    """
    args = ModelArgs(
        dim=widths.dim,
        n_layers=n_layers,
        n_heads=widths.heads,
        n_kv_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        hidden_dim=widths.hidden,
        vocab_size=VOCAB,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(32.0),
        max_seq_len=131072,
        tie_word_embeddings=True,
    )
    model = Transformer(args)
    q_rows, kv_rows = widths.heads * widths.head_dim, widths.kv_heads * widths.head_dim
    gain = mx.ones((widths.dim,), mx.bfloat16)
    first = model.layers[0]
    first.attention.wqkv = PackedLinear([_matrix(rows, widths.dim) for rows in (q_rows, kv_rows, kv_rows)])
    first.attention.wo = _matrix(widths.dim, q_rows)
    first.feed_forward.w13 = PackedLinear([_matrix(widths.hidden, widths.dim) for _ in range(2)])
    first.feed_forward.w2 = _matrix(widths.dim, widths.hidden)
    for layer in model.layers:
        layer.attention.wqkv, layer.attention.wo = first.attention.wqkv, first.attention.wo
        layer.feed_forward.w13, layer.feed_forward.w2 = first.feed_forward.w13, first.feed_forward.w2
        layer.attention_norm.weight = layer.ffn_norm.weight = gain
    model.norm.weight, model.tok_embeddings.weight = gain, mx.zeros((VOCAB, widths.dim), mx.bfloat16)
    mx.eval(model.parameters())
    model.rope.frequencies = partial(model.rope.frequencies, table=False)
    model.use(kernels)
    model.compiles = compiles
    return model


def theirs(widths: Widths, n_layers: int) -> Any:
    """mlx-lm's llama of the same widths."""
    from mlx_lm.models import llama

    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=widths.dim,
        num_hidden_layers=n_layers,
        intermediate_size=widths.hidden,
        num_attention_heads=widths.heads,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        num_key_value_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        rope_theta=500000.0,
        max_position_embeddings=131072,
        rope_scaling={"rope_type": "llama3", "factor": 32.0, **scaling},
    )
    model = llama.Model(args)
    first = model.model.layers[0]
    q_rows, kv_rows = widths.heads * widths.head_dim, widths.kv_heads * widths.head_dim
    for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
        first.self_attn[name] = _matrix(rows, widths.dim)
    first.self_attn.o_proj, first.mlp.down_proj = _matrix(widths.dim, q_rows), _matrix(widths.dim, widths.hidden)
    first.mlp.gate_proj, first.mlp.up_proj = (_matrix(widths.hidden, widths.dim) for _ in range(2))
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            layer.self_attn[name] = first.self_attn[name]
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer.mlp[name] = first.mlp[name]
        layer.input_layernorm.weight = layer.post_attention_layernorm.weight = mx.ones((widths.dim,), mx.bfloat16)
    model.model.norm.weight = mx.ones((widths.dim,), mx.bfloat16)
    model.model.embed_tokens.weight = mx.zeros((VOCAB, widths.dim), mx.bfloat16)
    mx.eval(model.parameters())
    return model


def filled(widths: Widths, n_layers: int, used: int, *, theirs: bool = False) -> list[Any]:
    """A cache with `used` positions for this project's or mlx-lm's model; not evaluated."""
    capacity = -(-(used + 1) // KVCache.STEP) * KVCache.STEP + KVCache.STEP
    shape = (1, widths.kv_heads, capacity, widths.head_dim)
    cache = [_their_cache(shape) if theirs else _our_cache(shape) for _ in range(n_layers)]
    for entry in cache:
        entry.offset = used
    return cache


def _our_cache(shape: tuple[int, ...]) -> KVCache:
    entry = KVCache()
    entry._kv = mx.zeros((2, *shape), mx.bfloat16)
    return entry


def _their_cache(shape: tuple[int, ...]) -> Any:
    from mlx_lm.models.cache import KVCache as TheirCache

    entry = TheirCache()
    entry.keys, entry.values = mx.zeros(shape, mx.bfloat16), mx.zeros(shape, mx.bfloat16)
    return entry


def step(model: Any, cache: list[Any]) -> Callable[[mx.array], mx.array]:
    """A function that decodes one token `(1, 1)` with either model, and returns its logits, not evaluated."""
    if isinstance(model, Transformer):
        return lambda token: model(token, cache[0].offset, cache)
    return lambda token: model(token, cache)


def _matrix(rows: int, columns: int) -> nn.QuantizedLinear:
    """A quantized matrix of zeros; MLX's random initialization of that size would take seconds."""
    linear = nn.QuantizedLinear(GROUP, 1, bias=False, group_size=GROUP, bits=BITS)
    linear.weight = mx.zeros((rows, columns * BITS // 32), mx.uint32)
    linear.scales = linear.biases = mx.zeros((rows, columns // GROUP), mx.bfloat16)
    return linear
