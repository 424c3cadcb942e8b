"""The trial of the cache in two buffers: tokens decoded with two in flight, after a long context.

Whether a plain cache is copied depends on the model, the chip and the speed of the host (`cache/double_buffered.py`).
So only the loop of decoding itself shows it.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mlx_llama3.autotune.trial import Case
from mlx_llama3.autotune.whole_step import stored_shapes
from mlx_llama3.generation.decoding import decode
from mlx_llama3.generation.sampling import Sampler, Sampling
from mlx_llama3.model.cache.double_buffered import DoubleBufferedKVCache
from mlx_llama3.model.cache.kv_cache import KVCache

import mlx.core as mx
from mlx.utils import tree_flatten

if TYPE_CHECKING:
    from mlx_llama3.model.transformer import Transformer

TOKENS = 4
CAPACITY = 2048  # positions of a buffer
CONTEXT = CAPACITY - TOKENS  # positions before the tokens

# MLX waits while more than 10 full command buffers are unfinished, and one is full with 40 or 50 million elements. A
# model whose weights fill more of them for each token than this never has the token before unfinished.
MOST_ELEMENTS = 11 * (50 << 20)


def cache_cases(model: "Transformer") -> Iterator[Case]:
    """The case of decoding with a cache of two buffers, for a model that is small enough to gain by it."""
    if sum(array.size for _, array in tree_flatten(model.parameters())) > MOST_ELEMENTS:
        return
    args, dtype = model.args, model.norm.weight.dtype
    yield Case(
        "double_buffer",
        f"{TOKENS} tokens after {CONTEXT}",
        (mx.zeros((1, args.vocab_size), dtype),),
        _decoding(model, DoubleBufferedKVCache),
        _decoding(model, KVCache),
        lambda inputs, _: inputs,
        dtype,
        f"{args.n_kv_heads}heads,{stored_shapes(model)}",
        calls=1,
        queued=True,
    )


def _decoding(model: "Transformer", make: Callable[[], KVCache]) -> Callable[[mx.array], list[mx.array]]:
    """A function that decodes greedily from logits `(1, vocab)`, and returns the largest logit of each token after the
    first, `(TOKENS,)`."""
    cache: list[KVCache] = []

    def decoded(logits: mx.array) -> list[mx.array]:
        if not cache:
            cache.extend(_filled(model, make) for _ in model.layers)
        for layer in cache:
            layer.trim(layer.offset - CONTEXT)
        largest = []
        sampler = Sampler(Sampling(), model.args.vocab_size)
        for choice in decode(model, logits, cache, sampler, count=TOKENS + 1):
            mx.eval(choice.token)  # as a reader of the answer does, before the token after the next is built
            largest.append(choice.largest)
        return [mx.concatenate(largest[1:])]

    return decoded


def _filled(model: "Transformer", make: Callable[[], KVCache]) -> KVCache:
    """A cache of random keys and values of `CONTEXT` positions, with room for the tokens."""
    shape = (2, 1, model.args.n_kv_heads, CAPACITY, model.args.head_dim)
    layer = make()
    layer.restore({"kv": mx.random.normal(shape, key=mx.random.key(0)).astype(model.norm.weight.dtype)}, CONTEXT)
    return layer
