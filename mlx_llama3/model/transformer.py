"""The Llama 3 Transformer (Meta `models/llama3/model.py`), on MLX.

B batch, S new positions, T positions so far (cache and new), with Meta's names for modules.
"""

from mlx_llama3.model.cache.kv_cache import KVCache, check_start
from mlx_llama3.model.cache.settings import DEFAULT, CacheSettings, make_layers
from mlx_llama3.model.compiled import CompiledBlocks
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.model.kernels import rope_qkv, swiglu_qmv
from mlx_llama3.model.kernels.kernel_set import REFERENCE, Kernels
from mlx_llama3.model.layers.attention import scaled_dot_product_attention
from mlx_llama3.model.layers.packed_linear import PackedLinear
from mlx_llama3.model.layers.rope import Rope, RopeTables, StartPos
from mlx_llama3.model.residual import Residual, ResidualWatch

import mlx.core as mx
import mlx.nn as nn


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis (arXiv 1910.07467); statistics in float32, dtype of x kept."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((dim,))
        self.eps = eps

    def __call__(self, x: mx.array | Residual) -> mx.array:
        if isinstance(x, Residual):
            return x.normed(self.weight, self.eps)
        return mx.fast.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245): `n_kv_heads` keys and values serve `n_heads` queries."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = args.n_heads, args.n_kv_heads, args.head_dim
        self.scale = args.head_dim**-0.5
        self.fused = False
        q_rows, kv_rows = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        self.wqkv = PackedLinear([nn.Linear(args.dim, rows, bias=False) for rows in (q_rows, kv_rows, kv_rows)])
        self.wo = nn.Linear(q_rows, args.dim, bias=False)

    def __call__(
        self, x: mx.array, start_pos: StartPos, freqs: RopeTables, mask: str | None, cache: KVCache | None = None
    ) -> mx.array:
        q, kv = self.project(x, start_pos, freqs)
        if cache is None:
            out = scaled_dot_product_attention(q, kv[0, ...], kv[1, ...], self.scale, mask)
        else:
            out = cache.attend(q, kv, self.scale, mask)
        return self.join(out)

    def project(self, x: mx.array, start_pos: StartPos, freqs: RopeTables) -> tuple[mx.array, mx.array]:
        """`(B, S, dim)`, normed -> rotated queries `(B, n_heads, S, head_dim)`; rotated keys, and values,
        `(2, B, n_kv_heads, S, head_dim)`."""
        rotate = rope_qkv.fused if self.fused else rope_qkv.reference
        return rotate(self.wqkv.packed(x), self.n_heads, self.n_kv_heads, start_pos, freqs)

    def join(self, heads: mx.array) -> mx.array:
        """What the heads found, `(B, n_heads, S, head_dim)` -> the update `(B, S, dim)`."""
        B, _, S, _ = heads.shape
        if S > 1:  # of one position no axes need to move
            heads = heads.transpose(0, 2, 1, 3)  # (B, S, n_heads, head_dim)
        return self.wo(heads.reshape(B, S, -1))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): `w2(silu(w1 x) * w3 x)`."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w13 = PackedLinear([nn.Linear(args.dim, args.hidden_dim, bias=False) for _ in range(2)])
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.fused = False

    def __call__(self, x: mx.array) -> mx.array:
        swiglu = swiglu_qmv.fused if self.fused else swiglu_qmv.reference
        return self.w2(swiglu(self.w13, x))  # (B, S, hidden_dim) between


class TransformerBlock(nn.Module):
    """Pre-norm residual block: each branch reads a normed copy of the stream and adds its update to it."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    def __call__(
        self,
        x: mx.array | Residual,
        start_pos: StartPos,
        freqs: RopeTables,
        mask: str | None,
        cache: KVCache | None = None,
    ) -> mx.array | Residual:
        """`(B, S, dim)` -> `(B, S, dim)`."""
        h = x + self.attention(self.attention_norm(x), start_pos, freqs, mask, cache)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """A whole model: embedding, `n_layers` blocks, final norm, head (the embedding again when tied)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = [TransformerBlock(args) for _ in range(args.n_layers)]
        self.norm = RMSNorm(args.dim, args.norm_eps)
        if not args.tie_word_embeddings:
            self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.rope = Rope(args)
        # Is told of every add to the residual stream, if set.
        self.watch: ResidualWatch | None = None
        # On a GPU the operations of a decoding pass are recorded. A CPU would have to compile what `mx.compile` makes.
        self.compiles = mx.default_device() == mx.gpu
        self.use(REFERENCE)

    def use(self, kernels: Kernels) -> None:
        """Have these fused kernels serve from now on, where shapes and types allow it.

        Recordings of passes are dropped: call it also after a weight was replaced in a model that has run.
        """
        self.kernels, self.compiled_blocks = kernels, CompiledBlocks()
        for layer in self.layers:
            layer.attention.fused, layer.feed_forward.fused = kernels.rope_qkv, kernels.swiglu_qmv

    def __call__(self, tokens: mx.array, start_pos: int = 0, cache: list[KVCache] | None = None) -> mx.array:
        """Logits of the next token after each position.

        Args:
            tokens: ids `(B, S)`, any integer dtype.
            start_pos: position of the first of them; must be where `cache` ends, 0 without one.
            cache: from `make_cache`, extended by the S positions; None for a pass that remembers nothing.

        Returns:
            `(B, S, vocab_size)` in the model's dtype.

        Raises:
            ValueError: `tokens` is not `(B, S)`, or `start_pos` disagrees with the cache.
        """
        return self.head(self.residual(tokens, start_pos, cache))

    def residual(self, tokens: mx.array, start_pos: int = 0, cache: list[KVCache] | None = None) -> mx.array | Residual:
        """The residual stream after the last block, `(B, S, dim)`; arguments as in `__call__`.

        Where the fused add and norm serve, or the stream is watched, its last add waits for the head's norm; `plain`
        makes it an array.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens have shape {tokens.shape}, expected (batch, positions)")
        check_start(cache, start_pos, len(self.layers))
        length = tokens.shape[1]
        start_pos = cache[0].positions(length) if cache else start_pos  # of each sequence, where they differ
        freqs = self.rope.frequencies(start_pos, length)
        mask = "causal" if length > 1 else None
        x = self.tok_embeddings(tokens)
        if self.kernels.add_rms_norm or self.watch is not None:
            x = Residual(x, fused=self.kernels.add_rms_norm, watch=self.watch)
        compiles = self.compiles and length == 1 and cache is not None
        layers = self.compiled_blocks.of(self.layers) if compiles else self.layers
        for layer, entry in zip(layers, cache or [None] * len(layers), strict=True):
            x = layer(x, start_pos, freqs, mask, entry)
        return x

    def head(self, x: mx.array | Residual) -> mx.array:
        """Final norm and head: `(..., dim)` of the residual stream -> logits `(..., vocab_size)`."""
        return self.unembed(self.norm(x))

    def unembed(self, x: mx.array) -> mx.array:
        """The head alone, for what is normed already: `(..., dim)` -> `(..., vocab_size)`."""
        return self.tok_embeddings.as_linear(x) if self.args.tie_word_embeddings else self.output(x)

    @property
    def is_whole(self) -> bool:
        """Whether all weights are in this process; the model that leads several ranks says False."""
        return True

    def need_whole(self) -> None:
        """Raise `UserError` if this is a part of a model, for what reads single heads, neurons or weights."""

    def make_cache(self, settings: CacheSettings = DEFAULT) -> list[KVCache]:
        """An empty cache, one entry a layer. Raises `UserError` for settings that this model cannot have."""
        return make_layers(settings, self.args, fused=self.kernels.sdpa_quantized)
