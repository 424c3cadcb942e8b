"""KV caches: plain, in two buffers, quantized, with a sliding window, and for a batch.

`CacheSettings` selects one. `PrefixCache` pairs a cache with the token ids that it holds.
"""

from mlx_llama3.model.cache.batch import BatchKVCache
from mlx_llama3.model.cache.double_buffered import DoubleBufferedKVCache
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.quantized import QuantizedKVCache
from mlx_llama3.model.cache.rotating import RotatingKVCache
from mlx_llama3.model.cache.settings import CacheSettings, make_layers

__all__ = [
    "BatchKVCache",
    "CacheSettings",
    "DoubleBufferedKVCache",
    "KVCache",
    "QuantizedKVCache",
    "RotatingKVCache",
    "make_layers",
]
