"""The cost of live norms: decode speed with and without `trace=True`, alternating in one process; medians and ratio.

python benchmarks/tracing.py [--model FOLDER] [--rounds 7] [--tokens 32]
"""

import argparse
import json
import statistics
import time

import mlx_llama3
from convert.demo import demo_model

PROMPT = [100 + 7 * i % 10000 for i in range(64)]


def decode_speed(model: "mlx_llama3.model.Transformer", tokenizer: object, count: int, trace: bool) -> float:
    """Tokens/s after the first one; greedy, and stop ids do not end it."""
    ban = {token: float("-inf") for token in tokenizer.stop_ids}
    steps = mlx_llama3.generate(model, tokenizer, PROMPT, max_tokens=count + 1, logit_bias=ban, trace=trace)
    next(steps)
    begin = time.perf_counter()
    decoded = sum(1 for _ in steps)
    return decoded / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder; default: the demo model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    model, tokenizer = mlx_llama3.load(options.model or str(demo_model()))
    speeds: dict[bool, list[float]] = {False: [], True: []}
    decode_speed(model, tokenizer, 4, True)  # warm-up
    for round_number in range(options.rounds):
        for trace in (False, True) if round_number % 2 == 0 else (True, False):
            speeds[trace].append(decode_speed(model, tokenizer, options.tokens, trace))
    plain, traced = (statistics.median(speeds[trace]) for trace in (False, True))
    # The ratio within a round: the machine's drift cancels out.
    ratio = statistics.median(t / p for p, t in zip(speeds[False], speeds[True], strict=True))
    print(f"decode tokens/s: plain {plain:.1f}, traced {traced:.1f}, ratio {ratio:.3f}")
    print(json.dumps({"plain": plain, "traced": traced, "ratio": ratio}))


if __name__ == "__main__":
    main()
