"""How a model decodes on this machine: speed, the cost of live norms, greedy tokens, memory, copies of the cache."""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mlx_llama3.generation.stream import generate
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.kernels.kernel_set import REFERENCE, Kernels

import mlx.core as mx

if TYPE_CHECKING:
    from mlx_llama3.model.transformer import Transformer
    from mlx_llama3.tokenizer.tokenizer import Tokenizer

PROMPT, TOKENS, ROUNDS = 128, 64, 3
GREEDY = 48


class LargeStepCache(KVCache):
    """A cache whose buffer has room for 8,192 positions from the start.

    A token writes one position. If MLX copies the whole buffer for it, decoding with this cache is slower than with the
    plain one, whose buffer grows by 256 positions.
    """

    STEP = 8192


def decoding_section(model: "Transformer", tokenizer: "Tokenizer", kernels: Kernels) -> dict[str, Any]:
    """Speeds in tokens per second, as medians of alternating rounds; memory in bytes.

    kernels: those that the trial chose.
    """

    def large_buffer() -> list[KVCache]:
        return [LargeStepCache() for _ in model.layers]

    variants: dict[str, Callable[[], float]] = {
        "chosen kernels": lambda: _decode(model, tokenizer, kernels),
        "references": lambda: _decode(model, tokenizer, REFERENCE),
        "chosen kernels, live norms": lambda: _decode(model, tokenizer, kernels, trace=True),
        "chosen kernels, buffer of 8,192 positions": lambda: _decode(model, tokenizer, kernels, cache=large_buffer()),
    }
    readings: dict[str, list[float]] = {name: [] for name in variants}
    mx.reset_peak_memory()
    for number in range(ROUNDS + 1):
        for name in list(variants) if number % 2 else list(variants)[::-1]:
            speed = variants[name]()
            if number:  # the first round compiles, and warms the caches
                readings[name].append(speed)
    peak = mx.get_peak_memory()
    return {
        "decode": {name: median(speeds) for name, speeds in readings.items()},
        "readings": readings,
        "greedy": _agreement(model, tokenizer, kernels),
        "memory": {"weights": _weights(model), "peak": peak},
    }


def _prompt(model: "Transformer") -> list[int]:
    return [(100 + 7 * i) % min(model.args.vocab_size, 10_000) for i in range(PROMPT)]


def _decode(model: "Transformer", tokenizer: "Tokenizer", kernels: Kernels, **options: Any) -> float:
    """Tokens per second after the first one; stop ids do not end the answer."""
    model.use(kernels)
    ban = {token: float("-inf") for token in tokenizer.stop_ids}
    steps = generate(model, tokenizer, _prompt(model), max_tokens=TOKENS + 1, logit_bias=ban, **options)
    next(steps)
    start = perf_counter()
    count = sum(1 for _ in steps)
    return count / (perf_counter() - start)


def _agreement(model: "Transformer", tokenizer: "Tokenizer", kernels: Kernels) -> dict[str, int | None]:
    """How many greedy tokens were compared, and the first that differs between the kernels and the references."""
    answers = []
    for each in (kernels, REFERENCE):
        model.use(each)
        answers.append([step.token for step in generate(model, tokenizer, _prompt(model), max_tokens=GREEDY)])
    first = next((i for i, pair in enumerate(zip(*answers, strict=False)) if pair[0] != pair[1]), None)
    return {"tokens": min(map(len, answers)), "first difference": first}


def _weights(model: "Transformer") -> int:
    from mlx.utils import tree_flatten

    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))
