"""Whether decoding copies the KV cache, with one and with two tokens in flight, and what that costs on a Mac.

    python -m benchmarks.cache_copies

The first table is measured, on the CPU: most memory while decoding, in buffers of one layer's cache. MLX's rule for
what is written in place is the same on every device. Each token begins with a product that takes longer than encoding
the next token, as on a GPU that has enough to do. MLX queues at most 10 tasks; with 16 layers these are fewer than a
token's, so the host waits for the token before, and nothing is copied.

The second table is computed from a model of MLX's command buffers on a Mac (`command_buffers.py`).
"""

from collections.abc import Callable
from dataclasses import replace

from benchmarks.command_buffers import CHIPS, LAYERS_AND_VOCAB, TYPE, Decoding, decoding
from benchmarks.ledger_models import WIDTHS
from mlx_llama3.model.cache.double_buffered import DoubleBufferedKVCache
from mlx_llama3.model.cache.kv_cache import KVCache

import mlx.core as mx

HEADS, HEAD_DIM = 8, 64
PRODUCT = 1024  # rows and columns of the product at the beginning of each token
TOKENS, SKIPPED = 12, 4

# The other way to copy less, an old part and a newest one: positions of the newest part, which every token writes, and
# of a block that is moved from there to the old part.
NEWEST, BLOCK = 136, 64


def buffers_at_peak(make: Callable[[], KVCache], n_layers: int, *, in_flight: int, positions: int = 4096) -> float:
    """Most memory while tokens are decoded, in buffers a layer. The layers write to the cache and read all of it."""
    others = mx.get_active_memory()
    shape = (2, 1, HEADS, positions, HEAD_DIM)
    cache = [make() for _ in range(n_layers)]
    for layer in cache:
        layer.restore({"kv": mx.zeros(shape) + 1}, positions // 2)
    mx.eval([layer.state for layer in cache])
    square, queued = mx.zeros((PRODUCT, PRODUCT)), []
    x = mx.zeros((1, HEAD_DIM))
    mx.eval(square, x)
    nbytes = cache[0].state[0].nbytes
    for token in range(TOKENS):
        if token == SKIPPED:
            mx.synchronize()
            mx.reset_peak_memory()
        x = x + (square @ square)[0, :HEAD_DIM]
        for layer in cache:
            keys, _ = layer.update_and_fetch(mx.broadcast_to(x, (2, 1, HEADS, 1, HEAD_DIM)))
            x = mx.max(keys, axis=(0, 1, 2))
        mx.async_eval(x)
        queued.append(x)
        if len(queued) == in_flight:
            mx.eval(queued.pop(0))
    mx.synchronize()
    return (mx.get_peak_memory() - others - (1 + in_flight) * square.nbytes) / nbytes / n_layers


def print_measured() -> None:
    """Print the first table."""
    print("most memory while decoding on this CPU, in buffers a layer (1: never copied, 2 for two buffers)")
    print(f"{'':28}{'a plain cache':>18}{'two buffers':>18}")
    limit = mx.set_cache_limit(0)
    for n_layers in (1, 2, 4, 8, 16):
        for in_flight in (1, 2):
            cells = (
                f"{buffers_at_peak(make, n_layers, in_flight=in_flight):18.1f}"
                for make in (KVCache, DoubleBufferedKVCache)
            )
            print(f"{n_layers:3} layers, {in_flight} in flight{'':7}{''.join(cells)}")
    mx.set_cache_limit(limit)


def two_parts(name: str, positions: int, held: Decoding) -> float:
    """Bytes that a cache of an old and a newest part copies for a token, where `held` layers of a plain one are."""
    widths = WIDTHS[name]
    a_position = 2 * TYPE * 2 * widths.kv_heads * widths.head_dim  # read and written
    return held.copied_layers * a_position * (NEWEST + positions / BLOCK)


def print_modelled() -> None:
    """Print the second table."""
    print("\nbytes of a decoded token on a Mac by the model, by those without a copy (weights in 4 bits, groups of 64)")
    print("a plain cache / one of an old and a newest part / two buffers")
    contexts = (1023, 2047, 4095, 8191, 16383, 32767)
    print(f"{'positions':27}{''.join(f'{positions:16,}' for positions in contexts)}")
    for name in LAYERS_AND_VOCAB:
        for chip in (*CHIPS, replace(CHIPS[2], name="Max, instant host", encode=0.0, build=0.0)):
            cells = []
            for positions in contexts:
                plain, double = decoding(name, chip, positions), decoding(name, chip, positions, apart=2)
                parts = 1 + two_parts(name, positions, plain) / (plain.weights + plain.cache)
                cells.append(f"{plain.ratio:6.2f}/{parts:4.2f}/{double.ratio:4.2f}")
            print(f"{name:5}{chip.name:20}{''.join(cells)}")


if __name__ == "__main__":
    print_measured()
    print_modelled()
