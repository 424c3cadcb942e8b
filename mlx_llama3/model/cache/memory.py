"""How much memory the positions of a context take, and a refusal before a prompt that will not fit."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.settings import DEFAULT, CacheSettings, make_layers
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.system.memory import check_memory, free_memory

WAY_OUT = "shorten the prompt or the longest answer (--max-tokens)"
FEWER_BITS = ", or keep the cache in fewer bits (--kv-bits 8)"


def context_bytes(args: ModelArgs, dtype: mx.Dtype, positions: int, settings: CacheSettings = DEFAULT) -> int:
    """Bytes of the caches of all layers when they hold so many positions; dtype is that of the activations."""
    (layer,) = make_layers(settings, replace(args, n_layers=1))
    return args.n_layers * _layer_bytes(layer, args, dtype, positions)


def bytes_a_token(args: ModelArgs, dtype: mx.Dtype, settings: CacheSettings = DEFAULT) -> int:
    """Bytes by which the caches of all layers grow with a position, once there are many."""
    many = 16 * KVCache.STEP
    return (context_bytes(args, dtype, 2 * many, settings) - context_bytes(args, dtype, many, settings)) // many


def check_context(model: Transformer, cache: Sequence[KVCache], new: int) -> None:
    """Raise UserError, which names the way out, if memory does not suffice for `new` more positions in `cache`."""
    layer, end = cache[0], cache[0].offset + new
    held = sum(array.nbytes for array in layer.state)
    attention = model.layers[0].attention  # where heads are shared out to several machines, it has those of this one
    args = replace(model.args, n_heads=attention.n_heads, n_kv_heads=attention.n_kv_heads)
    grown = _layer_bytes(layer, args, model.norm.weight.dtype, end)
    way_out = WAY_OUT + (FEWER_BITS if type(layer) is KVCache else "")
    check_memory(len(cache) * max(0, grown - held), f"a context of {end} tokens", way_out, available=free_memory())


def _layer_bytes(layer: KVCache, args: ModelArgs, dtype: mx.Dtype, positions: int) -> int:
    """Bytes of a cache of this kind that holds so many positions. It is asked of such a cache: one is filled, but never
    computed, since shapes and types are known before that."""
    empty = copy.copy(layer)
    empty.restore({}, 0)
    q = mx.zeros((1, args.n_heads, positions, args.head_dim), dtype)
    kv = mx.zeros((2, 1, args.n_kv_heads, positions, args.head_dim), dtype)
    empty.attend(q, kv, 1.0, "causal")
    return sum(array.nbytes for array in empty.state)
