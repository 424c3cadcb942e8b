"""The largest model that fits: bytes of weights on each machine, for tensor and pipeline parallelism.

`python -m benchmarks.parallel_fit` prints the tables of `docs/distributed.md`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from convert.sources.params_json import from_meta
from mlx_llama3.checkpoint.quantization import Quantization
from mlx_llama3.checkpoint.tensor_shapes import expected_shapes
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.parallel.pipeline import layer_bounds
from mlx_llama3.parallel.slices import shard_shape
from mlx_llama3.parallel.tensor import check_heads, shard_of

GROUP = 64  # weights per group, with a scale and a bias of 16 bits each, as in mlx-lm's models
GIB = 1 << 30
# Memory besides weights and cache: the states of a pass and MLX's buffers.
WORK = GIB
MEMORIES = (16, 24, 36, 64, 96, 128, 256, 512)

# Meta's params.json of each size; the entries that determine the shapes.
_COMMON = {"vocab_size": 128256, "n_kv_heads": 8, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True}
SIZES: Mapping[str, Mapping[str, float]] = {
    "8B": {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim_multiplier": 1.3, "multiple_of": 1024},
    "70B": {"dim": 8192, "n_layers": 80, "n_heads": 64, "ffn_dim_multiplier": 1.3, "multiple_of": 4096},
    "405B": {"dim": 16384, "n_layers": 126, "n_heads": 128, "ffn_dim_multiplier": 1.2, "multiple_of": 4096},
}


def known_args(size: str) -> ModelArgs:
    """The arguments of "8B", "70B" or "405B"."""
    return from_meta({**_COMMON, **SIZES[size]}, source=size)


@dataclass(frozen=True)
class PlannedModel:
    """A hypothetical model whose matrices have `bits` bits: 16, or quantized in groups of 64."""

    args: ModelArgs
    bits: int
    folder: str = "the model"

    def quantization(self, _module: str) -> Quantization | None:
        """The quantization of every matrix; None for 16 bits."""
        return None if self.bits == 16 else Quantization(self.bits, GROUP)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """The bytes of a tensor or a shard with this shape."""
        if len(shape) == 1 or self.bits == 16:
            return 2 * prod(shape)
        rows, columns = shape
        return rows * (columns * self.bits // 8 + 2 * 2 * columns // GROUP)


def bytes_a_rank(args: ModelArgs, ranks: int, bits: int, *, pipeline: bool = False) -> list[int]:
    """The bytes of weights on each of `ranks` machines; bits: 16, or those of the quantized matrices.

    Raises `UserError` if the model cannot be split like this.
    """
    plan = PlannedModel(args, bits)
    if pipeline:
        bounds = layer_bounds(args, ranks, plan.folder)
        return [_pipeline_bytes(plan, bounds[rank], bounds[rank + 1], ends=rank == 0) for rank in range(ranks)]
    check_heads(args, ranks, plan.folder)
    return [_tensor_parallel_bytes(plan, rank, ranks) for rank in range(ranks)]


def cache_bytes_a_rank(args: ModelArgs, ranks: int, tokens: int) -> int:
    """The bytes of 16-bit keys and values of `tokens` tokens on each machine, with tensor parallelism."""
    return 2 * 2 * args.n_layers * (args.n_kv_heads // ranks) * args.head_dim * tokens


def _tensor_parallel_bytes(plan: PlannedModel, rank: int, ranks: int) -> int:
    shapes = expected_shapes(plan.args).items()
    return sum(plan.nbytes(shard_shape(shape, shard_of(name, plan, rank, ranks))) for name, shape in shapes)


def _pipeline_bytes(plan: PlannedModel, start: int, end: int, *, ends: bool) -> int:
    """The bytes of layers `start` to `end`, with `ends` also those of the embedding, the final norm and the head."""
    total = 0
    for name, shape in expected_shapes(plan.args).items():
        parts = name.split(".")
        if start <= int(parts[2]) < end if parts[1] == "layers" else ends:
            total += plan.nbytes(shape)
    return total


def table() -> list[str]:
    """Lines of Markdown: GiB of weights on each machine."""
    lines = ["| model | bits | one machine | each of 2 | each of 4 |", "| --- | --- | --- | --- | --- |"]
    for size in SIZES:
        args = known_args(size)
        for bits in (4, 8, 16):
            cells = [f"{max(bytes_a_rank(args, ranks, bits)) / GIB:.1f}" for ranks in (1, 2, 4)]
            lines.append(f"| {size} | {bits} | {' | '.join(cells)} |")
    return lines


def cache_table() -> list[str]:
    """Lines of Markdown: GiB of keys and values on each machine, for contexts of 8,192 and 131,072 tokens."""
    lines = ["| model | tokens | one machine | each of 2 | each of 4 |", "| --- | --- | --- | --- | --- |"]
    for size in SIZES:
        for tokens in (8192, 131072):
            cells = [f"{cache_bytes_a_rank(known_args(size), ranks, tokens) / GIB:.2f}" for ranks in (1, 2, 4)]
            lines.append(f"| {size} | {tokens} | {' | '.join(cells)} |")
    return lines


def largest(memory: int, ranks: int) -> str:
    """The largest of `SIZES`, in the most bits, that fits on machines of `memory` GiB each with a context of 8,192."""
    # Metal recommends at most two thirds of a small machine's memory, and three quarters of a large one's.
    room = memory * GIB * (2 / 3 if memory <= 36 else 3 / 4) - WORK
    for size in reversed(SIZES):
        args = known_args(size)
        for bits in (16, 8, 4):
            if max(bytes_a_rank(args, ranks, bits)) + cache_bytes_a_rank(args, ranks, 8192) <= room:
                return f"{size}, {bits} bits"
    return "none"


def largest_table() -> list[str]:
    """Lines of Markdown: the largest model, by the memory of each machine."""
    lines = ["| memory of each | one machine | 2 machines | 4 machines |", "| --- | --- | --- | --- |"]
    for memory in MEMORIES:
        lines.append(f"| {memory} GB | {' | '.join(largest(memory, ranks) for ranks in (1, 2, 4))} |")
    return lines


def tables() -> list[str]:
    """All tables of the page, each as Markdown."""
    return ["\n".join(lines) for lines in (table(), cache_table(), largest_table())]


if __name__ == "__main__":
    print("\n\n".join(tables()))
