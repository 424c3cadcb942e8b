"""The caches of keys and values: plain, quantized, with a window, and for a batch.

`CacheSettings` says which one is wanted, `PrefixCache` knows which token ids one holds.
"""

from mlx_llama3.model.cache.batch import BatchKVCache
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.quantized import QuantizedKVCache
from mlx_llama3.model.cache.rotating import RotatingKVCache
from mlx_llama3.model.cache.settings import CacheSettings, make_layers

__all__ = [
    "BatchKVCache",
    "CacheSettings",
    "KVCache",
    "QuantizedKVCache",
    "RotatingKVCache",
    "make_layers",
]
