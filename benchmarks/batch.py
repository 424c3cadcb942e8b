"""Throughput of many prompts in batches and one by one, on the same model in one run.

    python benchmarks/batch.py [--model FOLDER] [--prompts 16] [--sizes 4,8] [--tokens 32] [--rounds 3]

Greedy; stop ids do not end an answer, so every answer has `--tokens` tokens. Batch sizes alternate, in reversed order
in every other round. Prints medians of generated tokens per second (prefill included) and their ratios; the last line
is JSON.
"""

import argparse
import json
import statistics
import time

import mlx_llama3
from mlx_llama3.generation.batch import Request, generate_batch
from mlx_llama3.generation.sampling import Sampling
from mlx_llama3.generation.stream import generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder; default: the demo model")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--sizes", default="4,8", help="batch sizes, with commas")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.model is None:
        from convert.demo import demo_model

        options.model = str(demo_model())
    model, tokenizer = mlx_llama3.load(options.model)
    ban = Sampling(logit_bias={token: float("-inf") for token in tokenizer.stop_ids})
    requests = [
        Request([100 + (7 * i + n) % 10000 for i in range(20 + 5 * n % 40)], options.tokens, sampling=ban)
        for n in range(options.prompts)
    ]

    def seconds(size: int) -> float:
        begin = time.perf_counter()
        if size:
            count = sum(len(answer.tokens) for _, answer in generate_batch(model, tokenizer, requests, batch_size=size))
        else:
            count = sum(
                1
                for request in requests
                for _ in generate(
                    model, tokenizer, request.ids, max_tokens=request.max_tokens, logit_bias=ban.logit_bias
                )
            )
        if count != options.prompts * options.tokens:
            raise SystemExit(f"{count} tokens came, {options.prompts * options.tokens} were asked for")
        return time.perf_counter() - begin

    sizes = [0, *map(int, options.sizes.split(","))]
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    for round_number in range(options.rounds):
        for size in sizes if round_number % 2 == 0 else reversed(sizes):
            rates[size].append(options.prompts * options.tokens / seconds(size))
    report({size: statistics.median(readings) for size, readings in rates.items()})


def report(medians: dict[int, float]) -> None:
    """Print the table, and the same as a line of JSON; batch size 0 stands for one by one."""
    alone = medians[0]
    for size, rate in medians.items():
        name = f"{size} at a time" if size else "one by one"
        print(f"{name:14}{rate:10.1f} tokens/s{rate / alone:8.2f}")
    print(json.dumps({"batch": {str(size): {"tps": rate, "ratio": rate / alone} for size, rate in medians.items()}}))


if __name__ == "__main__":
    main()
