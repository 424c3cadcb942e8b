"""What larger chunks of a prompt would save on a GPU, and the memory that they take: a model of bytes and operations.

    python -m benchmarks.prompt_chunks

Time is counted in bytes of memory bandwidth. A chip does a number of operations in the time of one byte: 30 stands for
the GPUs up to M4 (an M4 Max: 16e12 a second beside 546e9 bytes), 120 for one with matrix units, such as the M5. Nothing
is taken to overlap, so a saving is the most that the model allows: a chip reads while it computes.

Larger chunks read the weights less often, and the cache's buffer, which each chunk makes larger, is copied less often.
Keys and values are read once for `QUERIES` queries, and activations once a layer, whatever the chunk. Scores are never
stored. What the model leaves out, only a Mac can show: the wait between two chunks, and how full a small chunk keeps
the GPU.
"""

from benchmarks.model_sizes import BITS, TOKENS, args_of
from benchmarks.parallel_fit import bytes_a_rank
from mlx_llama3.model.cache.memory import bytes_a_token
from mlx_llama3.model.config import ModelArgs

import mlx.core as mx

CHUNKS = (512, 1024, 2048)
OPERATIONS_A_BYTE = (30, 120)
QUERIES = 32  # that a threadgroup of MLX's attention to a prompt has
BYTES = 2  # of an activation
BITS_A_WEIGHT = BITS + 0.5  # with a scale and a bias of 16 bits for 64 weights


def fixed(args: ModelArgs, weights: float, tokens: int, operations_a_byte: float) -> float:
    """The time of a prompt that its chunks do not change, in bytes: operations, activations, keys and values."""
    width = args.n_heads * args.head_dim
    qkv = width + 2 * args.n_kv_heads * args.head_dim
    operations = 2 * tokens * weights * 8 / BITS_A_WEIGHT + 2 * tokens**2 * width * args.n_layers
    # A value that one kernel writes and the next one reads counts twice.
    values = 8 * args.dim + 4 * qkv + 2 * width + 6 * args.hidden_dim
    keys = tokens / QUERIES * tokens / 2 * bytes_a_token(args, mx.bfloat16)
    return operations / operations_a_byte + tokens * args.n_layers * values * BYTES + keys


def repeated(args: ModelArgs, weights: float, tokens: int, chunk: int) -> float:
    """The bytes that each chunk moves again: the weights, and a copy of the cache, which is half full on average."""
    return tokens / chunk * (weights + 2 * tokens / 2 * bytes_a_token(args, mx.bfloat16))


def saving(alias: str, chunk: int, operations_a_byte: float, tokens: int = TOKENS) -> float:
    """The share of a prompt's time that chunks of `chunk` save at most, beside those of `CHUNKS[0]`."""
    args = args_of(alias)
    weights = bytes_a_rank(args, 1, BITS)[0]
    same = fixed(args, weights, tokens, operations_a_byte)
    now, then = (same + repeated(args, weights, tokens, each) for each in (CHUNKS[0], chunk))
    return 1 - then / now


def pass_bytes(alias: str, chunk: int) -> int:
    """The activations of a chunk that are in memory at once: stream, norm, w1|w3, and SwiGLU."""
    args = args_of(alias)
    return BYTES * chunk * (2 * args.dim + 3 * args.hidden_dim)


def main() -> None:
    """Print a line for each model and chunk."""
    print(f"a prompt of {TOKENS:,} tokens in 4 bits: activations, and the most that a chunk saves beside {CHUNKS[0]}")
    print(
        f"{'':14}{'chunk':>6}{'activations':>14}" + "".join(f"{f'{each} ops/byte':>16}" for each in OPERATIONS_A_BYTE)
    )
    for alias in ("llama3.2-1b", "llama3.1-8b", "llama3.3-70b"):
        for chunk in CHUNKS:
            shares = "".join(f"{saving(alias, chunk, each):16.1%}" for each in OPERATIONS_A_BYTE)
            print(f"{alias:14}{chunk:6}{pass_bytes(alias, chunk) / 1e6:11.0f} MB{shares}")


if __name__ == "__main__":
    main()
