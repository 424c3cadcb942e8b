"""Sizes of models and caches, computed from the shapes: `python -m benchmarks.model_sizes` prints both tables.

The first is in README.md, the second in docs/long-context.md.

On disk: all matrices in 4 bits, in groups of 64 that share a scale and a bias of 16 bits each, as in the repositories
that the aliases name. Memory: these weights, and keys and values of 8,192 tokens in 16 bits. Smallest Mac: Metal
recommends that a program takes two thirds of a memory of up to 36 GB, and three quarters of a larger one; 1 GiB of that
is for the work of a pass.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.parallel_fit import GIB, WORK, bytes_a_rank, known_args
from convert.sources.params_json import from_meta
from mlx_llama3.model.cache.memory import bytes_a_token, context_bytes
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.system.hub import ALIASES

import mlx.core as mx

BITS, TOKENS = 4, 8192
MEMORIES = (8, 16, 24, 32, 36, 48, 64, 96, 128)  # of Macs, in GB as they are sold
# Of Meta's params.json of Llama 3.2, as far as it decides the shapes; larger sizes are in benchmarks/parallel_fit.py.
_COMMON = {"vocab_size": 128256, "n_kv_heads": 8, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True}
_SMALL = {
    "1B": {"dim": 2048, "n_layers": 16, "n_heads": 32, "ffn_dim_multiplier": 1.5, "multiple_of": 256},
    "3B": {"dim": 3072, "n_layers": 28, "n_heads": 24, "ffn_dim_multiplier": 1.0, "multiple_of": 256},
}


def args_of(alias: str) -> ModelArgs:
    """The shapes of an alias such as "llama3.2-1b"."""
    size = alias.rpartition("-")[2].upper()
    if size not in _SMALL:
        return known_args(size)
    return replace(from_meta({**_COMMON, **_SMALL[size]}, source=size), tie_word_embeddings=True)


def smallest_mac(needed: int) -> int:
    """The least memory, of `MEMORIES`, on which so many bytes fit."""
    return next(m for m in MEMORIES if needed + WORK <= m * GIB * (2 / 3 if m <= 36 else 3 / 4))


def model_rows() -> Iterator[str]:
    """Lines of Markdown, one an alias: on disk, bits a weight, memory, smallest Mac."""
    for alias in ALIASES:
        args = args_of(alias)
        weights = bytes_a_rank(args, 1, BITS)[0]
        needed = weights + context_bytes(args, mx.bfloat16, TOKENS)
        yield f"| `{alias}` | {weights / 1e9:.1f} GB | {BITS} | {needed / 1e9:.1f} GB | {smallest_mac(needed)} GB |"


def cache_rows() -> Iterator[str]:
    """Lines of Markdown, one an alias: the cache of a token, of 8,192 tokens, of the context in 16, 8 and 4 bits."""
    for alias in ALIASES:
        args = args_of(alias)
        whole = [context_bytes(args, mx.bfloat16, args.max_seq_len, CacheSettings(kv_bits=b)) for b in (None, 8, 4)]
        sizes = [context_bytes(args, mx.bfloat16, TOKENS), *whole]
        cells = " | ".join(f"{size / 1e9:.1f} GB" for size in sizes)
        yield f"| `{alias}` | {bytes_a_token(args, mx.bfloat16) / 1e3:.0f} kB | {cells} |"


if __name__ == "__main__":
    print("\n".join([*model_rows(), "", *cache_rows()]))
