"""The Llama 3 Transformer (Meta `models/llama3/model.py`), on MLX.

Modules and parameters have Meta's names. In shapes, B is the batch, S the new positions of a pass.
"""

from mlx_llama3.model.cache.kv_cache import KVCache, check_start
from mlx_llama3.model.cache.settings import DEFAULT, CacheSettings, make_layers
from mlx_llama3.model.compiled import CompiledBlocks
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.model.kernels import norm_rope_qkv, norm_swiglu_qmv, rope_qkv, swiglu_qmv
from mlx_llama3.model.kernels.kernel_set import ADDING, REFERENCE, Kernels, Rows
from mlx_llama3.model.layers.attention import scaled_dot_product_attention
from mlx_llama3.model.layers.packed_linear import PackedLinear
from mlx_llama3.model.layers.rope import Rope, RopeTables, StartPos
from mlx_llama3.model.residual import Normed, Residual, ResidualWatch, plain

import mlx.core as mx
import mlx.nn as nn


def _rows(x: mx.array) -> Rows:
    """The number of rows of x, `(..., width)`."""
    return Rows.of(x.size // x.shape[-1])


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis (arXiv 1910.07467); computed in float32, returned in the dtype of x.

    reader: the kernel of the product that reads the norm, if it can compute the norm itself.
    """

    def __init__(self, dim: int, eps: float, reader: str | None = None) -> None:
        super().__init__()
        self.weight = mx.ones((dim,))
        self.eps, self.reader = eps, reader

    def __call__(self, x: mx.array | Residual) -> mx.array | Normed:
        """`(..., dim)` -> `(..., dim)`; a `Normed` only if `reader` is in use."""
        if not isinstance(x, Residual):
            return mx.fast.rms_norm(x, self.weight, self.eps)
        return Normed(x, self.weight, self.eps) if x.waits_for(self.reader) else x.normed(self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245): `n_heads` query heads share `n_kv_heads` key and value heads."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = args.n_heads, args.n_kv_heads, args.head_dim
        self.scale = args.head_dim**-0.5
        self.fused = Rows.NONE  # `Transformer.use` sets it
        q_rows, kv_rows = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        self.wqkv = PackedLinear([nn.Linear(args.dim, rows, bias=False) for rows in (q_rows, kv_rows, kv_rows)])
        self.wo = nn.Linear(q_rows, args.dim, bias=False)

    def __call__(
        self,
        x: mx.array | Normed,
        start_pos: StartPos,
        freqs: RopeTables,
        mask: str | None,
        cache: KVCache | None = None,
    ) -> mx.array:
        """The normed stream `(B, S, dim)` -> the update `(B, S, dim)`; its keys and values are appended to `cache`."""
        q, kv = self.project(x, start_pos, freqs)
        if cache is None:
            out = scaled_dot_product_attention(q, kv[0, ...], kv[1, ...], self.scale, mask)
        else:
            out = cache.attend(q, kv, self.scale, mask)
        return self.join(out)

    def project(self, x: mx.array | Normed, start_pos: StartPos, freqs: RopeTables) -> tuple[mx.array, mx.array]:
        """The normed stream `(B, S, dim)` -> queries `(B, n_heads, S, head_dim)` and, in one array, keys and values
        `(2, B, n_kv_heads, S, head_dim)`. RoPE is applied to queries and keys."""
        heads = self.n_heads, self.n_kv_heads, start_pos, freqs
        if isinstance(x, Normed) and x.suits(norm_rope_qkv, self.wqkv, *heads):
            return x.read_by(norm_rope_qkv, self.wqkv, *heads)
        x = plain(x)
        rotate = rope_qkv.fused if _rows(x) in self.fused else rope_qkv.reference
        return rotate(self.wqkv.packed(x), *heads)

    def join(self, heads: mx.array) -> mx.array:
        """The outputs of the heads `(B, n_heads, S, head_dim)` -> the update `(B, S, dim)`."""
        B, _, S, _ = heads.shape
        if S > 1:  # one position has the same memory order either way
            heads = heads.transpose(0, 2, 1, 3)  # (B, S, n_heads, head_dim)
        return self.wo(heads.reshape(B, S, -1))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): `w2(silu(w1 x) * w3 x)`."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w13 = PackedLinear([nn.Linear(args.dim, args.hidden_dim, bias=False) for _ in range(2)])
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.fused = Rows.NONE  # `Transformer.use` sets it

    def __call__(self, x: mx.array | Normed) -> mx.array:
        """The normed stream `(B, S, dim)` -> the update `(B, S, dim)`."""
        if isinstance(x, Normed) and x.suits(norm_swiglu_qmv, self.w13):
            return self.w2(x.read_by(norm_swiglu_qmv, self.w13))
        x = plain(x)
        swiglu = swiglu_qmv.fused if _rows(x) in self.fused else swiglu_qmv.reference
        return self.w2(swiglu(self.w13, x))  # swiglu: (B, S, hidden_dim)


class TransformerBlock(nn.Module):
    """Pre-norm residual block: attention and feed-forward each read the normed stream and add their update to it."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps, reader="norm_rope_qkv")
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps, reader="norm_swiglu_qmv")

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
    """The model: token embedding, `n_layers` blocks, final norm, output head (the embedding again if tied)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = [TransformerBlock(args) for _ in range(args.n_layers)]
        self.norm = RMSNorm(args.dim, args.norm_eps)
        if not args.tie_word_embeddings:
            self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.rope = Rope(args)
        # Called after every add to the residual stream, if set.
        self.watch: ResidualWatch | None = None
        # Decoding runs compiled blocks, but only on a GPU: on a CPU, `mx.compile` calls a C++ compiler.
        self.compiles = mx.default_device() == mx.gpu
        self.use(REFERENCE)

    def use(self, kernels: Kernels) -> None:
        """Choose the operations that run as fused kernels. A kernel's reference runs for inputs that it does not take.

        This drops the compiled blocks, in which weights are constants. So call it also after replacing a weight of a
        model that has run.
        """
        self.kernels, self.compiled_blocks = kernels, CompiledBlocks()
        for layer in self.layers:
            layer.attention.fused, layer.feed_forward.fused = kernels.rope_qkv, kernels.swiglu_qmv

    def __call__(self, tokens: mx.array, start_pos: int = 0, cache: list[KVCache] | None = None) -> mx.array:
        """The logits of the next token, after each position.

        Args:
            tokens: token ids `(B, S)`, any integer dtype.
            start_pos: position of the first token: the number of positions in `cache`, or 0 without a cache.
            cache: from `make_cache`; the S positions are appended to it. None: attend to `tokens` alone.

        Returns:
            `(B, S, vocab_size)` in the model's dtype.

        Raises:
            ValueError: `tokens` is not `(B, S)`, or `start_pos` does not match the cache.
        """
        return self.head(self.residual(tokens, start_pos, cache))

    def residual(self, tokens: mx.array, start_pos: int = 0, cache: list[KVCache] | None = None) -> mx.array | Residual:
        """The residual stream after the last block, `(B, S, dim)`; arguments as in `__call__`.

        It is a `Residual`, whose last add waits for the final norm, if a kernel does adds or `watch` is set; `plain`
        makes it an array.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens have shape {tokens.shape}, expected (batch, positions)")
        check_start(cache, start_pos, len(self.layers))
        length = tokens.shape[1]
        start_pos = cache[0].positions(length) if cache else start_pos  # (B,) for a batch of unequal rows
        freqs = self.rope.frequencies(start_pos, length)
        mask = "causal" if length > 1 else None
        x = self.tok_embeddings(tokens)
        kernels = self.kernels.at(tokens.size)
        if not kernels.isdisjoint(ADDING) or self.watch is not None:
            x = Residual(x, kernels=kernels, watch=self.watch)
        decodes = length == 1 and cache is not None
        blocks = self.compiled_blocks.of(self.layers) if self.compiles and decodes else self.layers
        for block, layer_cache in zip(blocks, cache or [None] * len(blocks), strict=True):
            x = block(x, start_pos, freqs, mask, layer_cache)
        return x

    def head(self, x: mx.array | Residual) -> mx.array:
        """Final norm and output head: the residual stream `(..., dim)` -> logits `(..., vocab_size)`."""
        return self.unembed(self.norm(x))

    def unembed(self, x: mx.array) -> mx.array:
        """The output head alone: the normed stream `(..., dim)` -> logits `(..., vocab_size)`."""
        return self.tok_embeddings.as_linear(x) if self.args.tie_word_embeddings else self.output(x)

    @property
    def is_whole(self) -> bool:
        """Whether this process has all the weights; False for a model that is sharded over several ranks."""
        return True

    def need_whole(self) -> None:
        """Raise `UserError` if the model is sharded. Features that read single heads or weights call this first."""

    def make_cache(self, settings: CacheSettings = DEFAULT) -> list[KVCache]:
        """A new, empty cache: one `KVCache` a layer. Raises `UserError` for settings that do not fit the model."""
        return make_layers(settings, self.args, self.kernels)
