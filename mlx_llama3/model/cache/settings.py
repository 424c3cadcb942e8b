"""The options of a KV cache, and the caches of all layers that they select."""

from dataclasses import dataclass

from mlx_llama3.errors import UserError
from mlx_llama3.model.cache.double_buffered import DoubleBufferedKVCache
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.quantized import QuantizedKVCache
from mlx_llama3.model.cache.rotating import RotatingKVCache, Window
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.model.kernels.kernel_set import REFERENCE, Kernels, Rows
from mlx_llama3.model.kernels.kv_packing import KEY_GROUP, PackedLayout

KV_BITS = (4, 8)


@dataclass(frozen=True)
class CacheSettings:
    """Options of `Transformer.make_cache`; by default, a cache of all keys and values in the model's dtype.

    kv_bits: 4 or 8 stores values in that number of bits, and keys in 8 (`cache/quantized.py`).
    max_kv_size: most positions that a query sees, the `kv_keep` first and the latest ones (`cache/rotating.py`).
    Raises `UserError` for a value out of range, and for options that cannot be combined.
    """

    kv_bits: int | None = None
    max_kv_size: int | None = None
    kv_keep: int = 4

    def __post_init__(self) -> None:
        self._check_window()
        if self.kv_bits is not None and self.kv_bits not in KV_BITS:
            raise UserError(f"kv_bits is {self.kv_bits}; values of the cache take 4 or 8 bits")

    def _check_window(self) -> None:
        if self.kv_keep < 0:
            raise UserError(f"kv_keep is {self.kv_keep}; it must be a whole number, 0 or above")
        if self.max_kv_size is None:
            return
        if self.max_kv_size <= self.kv_keep:
            raise UserError(
                f"max_kv_size is {self.max_kv_size}; it must be above {self.kv_keep}, the first positions that are kept"
            )
        if self.kv_bits is not None:
            raise UserError("max_kv_size and kv_bits do not go together yet; leave one of them out")


DEFAULT = CacheSettings()


def make_layers(settings: CacheSettings, args: ModelArgs, kernels: Kernels = REFERENCE) -> list[KVCache]:
    """An empty cache, one entry a layer. kernels: at which rows a quantized one attends with `sdpa_quantized`, and
    whether a plain one has two buffers.

    Raises `UserError` for settings that do not fit the model.
    """
    if settings.max_kv_size is not None:
        window = Window(settings.max_kv_size, settings.kv_keep)
        return [RotatingKVCache(window) for _ in range(args.n_layers)]
    if settings.kv_bits is not None:
        if args.head_dim % KEY_GROUP:
            raise UserError(
                f"a cache in fewer bits needs heads of a multiple of {KEY_GROUP}, and this model's have "
                f"{args.head_dim}; leave it as it is"
            )
        layout = PackedLayout(args.head_dim, settings.kv_bits)
        return [QuantizedKVCache(layout, fused=kernels.sdpa_quantized) for _ in range(args.n_layers)]
    make = DoubleBufferedKVCache if Rows.ONE in kernels.double_buffer else KVCache
    return [make() for _ in range(args.n_layers)]
