"""How much a quantized cache changes a model's predictions, by bits and by the numbers of unquantized positions.

    python benchmarks/kv_quality.py [--model NAME] [--text FILE] [--tokens N]

Every position gets the true text as input, and attends to the earlier positions as the cache stores them. Prints the
mean KL divergence from the predictions with the plain cache, the share of equal best tokens, and both perplexities.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

import mlx_llama3
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.quantized import QuantizedKVCache
from mlx_llama3.model.kernels.kv_packing import PackedLayout
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx

STEP = QuantizedKVCache.FEW
# (bits of values, unquantized first positions, least number of unquantized newest ones, positions packed at a time)
FORMS = (
    (4, 0, 0, 8),
    (4, 32, 0, 8),
    (4, 0, 0, 64),
    (4, 4, 0, 64),
    (4, 32, 0, 64),
    (4, 4, 64, 64),
    (4, 32, 64, 64),
    (4, 64, 64, 64),
    (8, 0, 0, 8),
    (8, 32, 64, 64),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    model, tokenizer = mlx_llama3.load(args.model)
    ids = tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
    plain = log_probabilities(model, ids, KVCache)
    print(f"{len(ids)} tokens, perplexity {perplexity(plain, ids):.3f} with the plain cache")
    print("values  first  newest      divergence  same best token  perplexity")
    for bits, first, newest, block in FORMS:
        quantized_logs = log_probabilities(model, ids, quantized(model, bits, first, newest, block))
        divergence = (np.exp(plain) * (plain - quantized_logs)).sum(-1).mean()
        same = (plain.argmax(-1) == quantized_logs.argmax(-1)).mean()
        dense = f"{newest} to {newest + block - 1}"
        print(
            f"{bits:<6}  {first:<5}  {dense:<10}  {divergence:.2e}    {same:<15.2%}  "
            f"{perplexity(quantized_logs, ids):.3f}"
        )


def quantized(model: Transformer, bits: int, first: int, newest: int, block: int) -> Callable[[], KVCache]:
    """A function that creates a layer's cache of this form."""
    sizes = {"FIRST": first, "NEWEST": newest, "BLOCK": block, "ROOM": first + newest + block + STEP}
    form = type("Form", (QuantizedKVCache,), sizes)
    return lambda: form(PackedLayout(model.args.head_dim, bits), fused=model.kernels.sdpa_quantized)


def log_probabilities(model: Transformer, ids: list[int], make: Callable[[], KVCache]) -> np.ndarray:
    """The log probabilities of every next token, float32 `(len(ids), vocab_size)`."""
    cache, rows = [make() for _ in model.layers], []
    for start in range(0, len(ids), STEP):
        logits = model(mx.array([ids[start : start + STEP]]), start, cache)[0].astype(mx.float32)
        rows.append(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
    return np.concatenate(rows)


def perplexity(logs: np.ndarray, ids: list[int]) -> float:
    """The perplexity of the text under these predictions."""
    return float(np.exp(-logs[np.arange(len(ids) - 1), ids[1:]].mean()))


if __name__ == "__main__":
    main()
