"""Decode speed with and without drafts, for copying, summarizing and a free question; runs alternate in one process.

    python benchmarks/speculative.py [--model FOLDER] [--draft ngram] [--rounds 5] [--tokens 96] [--temperature 0]

Prints the times of passes over 1 to 17 positions, then medians of tokens per second after the first token, the median
of the ratios within a round, and the share of accepted drafted tokens. The last line is JSON.
"""

import argparse
import json
import statistics
import time

import mlx_llama3
from convert.demo import demo_model

import mlx.core as mx

TEXT = (
    "The lighthouse keeper climbed the stairs every evening at six. He carried a lamp, a book and a small bag of bread."
    " At the top he cleaned the glass, lit the flame and wrote the time in a long list. Ships passed in the dark, and "
    "none of them knew his name. In the morning he put out the flame, wrote the time again and walked down to the sea."
)
PROMPTS = {
    "copy": f"Repeat this text word for word:\n\n{TEXT}",
    "summary": f"Summarize this text:\n\n{TEXT}",
    "free": "Explain how plants make sugar from light.",
}
LENGTHS = (1, 2, 3, 5, 9, 17)


def pass_times(model: "mlx_llama3.model.Transformer", rounds: int) -> dict[int, float]:
    """Number of positions -> milliseconds of a pass over them, with 128 positions in the cache."""
    cache, ids = model.make_cache(), [100 + 7 * i for i in range(128)]
    mx.eval(model(mx.array([ids]), 0, cache))
    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(rounds + 1):
        for length in LENGTHS:
            begin = time.perf_counter()
            mx.eval(mx.argmax(model(mx.array([ids[:length]]), len(ids), cache), axis=-1))
            times[length].append(1000 * (time.perf_counter() - begin))
            for entry in cache:
                entry.trim(length)
    return {length: statistics.median(readings[1:]) for length, readings in times.items()}


def decode(model: object, tokenizer: object, ids: list[int], draft: object, options: dict) -> tuple[list[int], float]:
    """(the tokens of an answer, tokens per second after the first one)."""
    steps = mlx_llama3.generate(model, tokenizer, ids, draft=draft, **options)
    tokens = [next(steps).token]
    begin = time.perf_counter()
    tokens += [step.token for step in steps]
    return tokens, (len(tokens) - 1) / (time.perf_counter() - begin)


def compare(model: object, tokenizer: object, draft: object, ids: list[int], rounds: int, options: dict) -> dict:
    """Decode with and without drafts, alternating."""
    plain, drafted, same = [], [], True
    for number in range(rounds):
        used = draft.copy()  # a new one, because the switch keeps what it measured in earlier answers
        results = {}
        for drafting in (None, used) if number % 2 == 0 else (used, None):
            results[drafting is used] = decode(model, tokenizer, ids, drafting, options)
        same &= results[False][0] == results[True][0]
        plain.append(results[False][1])
        drafted.append(results[True][1])
    return {
        "plain": statistics.median(plain),
        "drafted": statistics.median(drafted),
        "ratio": statistics.median(d / p for d, p in zip(drafted, plain, strict=True)),
        "acceptance": used.acceptance,
        "proposed": used.proposed,
        "tokens": len(results[True][0]),
        "same": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder; default: the demo model")
    parser.add_argument("--draft", default="ngram", help="a smaller model, or ngram")
    parser.add_argument("--draft-tokens", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    model, tokenizer = mlx_llama3.load(options.model or str(demo_model()))
    draft = mlx_llama3.load_draft(options.draft, model, tokenizer, tokens=options.draft_tokens)
    times = pass_times(model, options.rounds)
    print("a pass over n positions: " + ", ".join(f"{n}: {ms:.1f} ms" for n, ms in times.items()))
    settings = {"max_tokens": options.tokens, "temperature": options.temperature, "seed": 1}
    results = {}
    print(f"{'tokens/s':10}{'plain':>8}{'drafted':>9}{'ratio':>7}{'right':>12}  same tokens")
    for name, prompt in PROMPTS.items():
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        results[name] = result = compare(model, tokenizer, draft, ids, options.rounds, settings)
        right = f"{result['acceptance']:.0%} of {result['proposed']}"
        speeds = f"{result['plain']:8.1f}{result['drafted']:9.1f}{result['ratio']:7.2f}"
        print(f"{name:10}{speeds}{right:>12}  {'yes' if result['same'] else 'NO'}")
    print(json.dumps({"milliseconds": times} | results))


if __name__ == "__main__":
    main()
