"""The memory that a KV cache takes."""

import copy
from dataclasses import replace

from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.settings import DEFAULT, CacheSettings, make_layers
from mlx_llama3.model.config import ModelArgs

import mlx.core as mx


def context_bytes(args: ModelArgs, dtype: mx.Dtype, positions: int, settings: CacheSettings = DEFAULT) -> int:
    """Bytes of the caches of all layers with this number of positions; dtype is that of the activations."""
    (layer,) = make_layers(settings, replace(args, n_layers=1))
    return args.n_layers * layer_bytes(layer, args, dtype, positions)


def bytes_a_token(args: ModelArgs, dtype: mx.Dtype, settings: CacheSettings = DEFAULT) -> int:
    """Bytes by which the caches of all layers grow a position, on average in a long context."""
    many = 16 * KVCache.STEP
    return (context_bytes(args, dtype, 2 * many, settings) - context_bytes(args, dtype, many, settings)) // many


def layer_bytes(layer: KVCache, args: ModelArgs, dtype: mx.Dtype, positions: int) -> int:
    """Bytes of a cache like `layer` with this number of positions.

    Builds a lazy cache of that length and reads its nbytes: shapes and dtypes are known without computing anything.
    """
    empty = copy.copy(layer)
    empty.restore({}, 0)
    q = mx.zeros((1, args.n_heads, positions, args.head_dim), dtype)
    kv = mx.zeros((2, 1, args.n_kv_heads, positions, args.head_dim), dtype)
    empty.attend(q, kv, 1.0, "causal")
    return sum(array.nbytes for array in empty.state)
