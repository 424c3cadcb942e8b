"""Logits of a checkpoint of any size: one layer at a time is read, run on the text, and freed.

A second text reads all weights again.
"""

from collections.abc import Callable

from convert.conversion.plan import PlanStep
from convert.sources.source import Source, SourceTensor
from mlx_llama3.checkpoint.tensor_names import official_to_hf
from mlx_llama3.model.layers.packed_linear import PackedLinear
from mlx_llama3.model.layers.rope import Rope
from mlx_llama3.model.transformer import RMSNorm, TransformerBlock

import mlx.core as mx
import mlx.nn as nn


def run_layerwise(source: Source, tokens: mx.array, *, on_layer: Callable[[], None] = lambda: None) -> mx.array:
    """Logits (S, vocab_size), float32, for the positions of `tokens` (S,); all weights are cast to float32.

    `on_layer` is called after each layer, and after the head.
    """
    args = source.args
    freqs = Rope(args).frequencies(0, tokens.size)
    mask = "causal" if tokens.size > 1 else None
    x = _embed(source.tensors["model.embed_tokens.weight"], tokens)[None]  # (1, S, dim)
    for layer in range(args.n_layers):
        x = _block(source, layer)(x, 0, freqs, mask)
        mx.eval(x)
        on_layer()
    norm = RMSNorm(args.dim, args.norm_eps)
    norm.weight = _whole(source.tensors["model.norm.weight"])
    head = "model.embed_tokens.weight" if args.tie_word_embeddings else "lm_head.weight"
    logits = _project(norm(x)[0], source.tensors[head])
    on_layer()
    return logits


def _embed(table: SourceTensor, tokens: mx.array) -> mx.array:
    rows = {token: table.rows(token, token + 1).astype(mx.float32) for token in set(tokens.tolist())}
    return mx.concatenate([rows[token] for token in tokens.tolist()])


def _whole(tensor: SourceTensor) -> mx.array:
    """A tensor in float32, read in blocks, so that no whole copy in the source's dtype is in memory."""
    size = PlanStep(tensor, mx.float32).block_rows
    rows = tensor.shape[0]
    blocks = [tensor.rows(at, min(at + size, rows)).astype(mx.float32) for at in range(0, rows, size)]
    mx.eval(blocks)
    return mx.concatenate(blocks) if len(blocks) > 1 else blocks[0]


def _block(source: Source, layer: int) -> TransformerBlock:
    """One transformer block, its weights in float32."""

    def weight(name: str) -> mx.array:
        return _whole(source.tensors[official_to_hf(f"layers.{layer}.{name}.weight")])

    def linear(name: str) -> nn.Linear:
        module = nn.Linear(1, 1, bias=False)
        module.weight = weight(name)
        return module

    block = TransformerBlock(source.args)
    block.attention_norm.weight, block.ffn_norm.weight = weight("attention_norm"), weight("ffn_norm")
    block.attention.wqkv = PackedLinear([linear(f"attention.{name}") for name in ("wq", "wk", "wv")])
    block.attention.wo = linear("attention.wo")
    block.feed_forward.w13 = PackedLinear([linear(f"feed_forward.{name}") for name in ("w1", "w3")])
    block.feed_forward.w2 = linear("feed_forward.w2")
    return block


def _project(x: mx.array, head: SourceTensor) -> mx.array:
    """(S, dim) -> (S, vocab_size), with the head read in blocks of rows."""
    size, rows = PlanStep(head, mx.float32).block_rows, head.shape[0]
    logits = [x @ head.rows(at, min(at + size, rows)).astype(mx.float32).T for at in range(0, rows, size)]
    mx.eval(logits)
    return mx.concatenate(logits, axis=1)
