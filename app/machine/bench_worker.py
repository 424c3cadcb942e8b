"""One process of `mlx-llama3 bench`: loads a model in one engine, measures, prints a JSON object.

Each engine runs in its own process, because two copies of a large model would not fit into memory, and because mlx-lm
would otherwise use the BLAS that this project loads. The process that measures mlx-lm imports nothing of this project.

    python -m mlx_llama3_main app.machine.bench_worker ENGINE FOLDER PROMPT TOKENS REVERSED
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

OURS, THEIRS = "mlx-llama3", "mlx-lm"
KERNELS, REFERENCES = "kernels", "references"
WARM_UP = 4  # tokens

# (prompt ids, number of tokens) -> the tokens, greedy; stop ids do not end it.
Generate = Callable[[list[int], int], Iterator[int]]


def main(argv: list[str]) -> int:
    """Run the measurement of the command line. A `UserError` is printed on standard error, with exit code 2."""
    engine, folder, length, count, reverse = argv[0], Path(argv[1]), int(argv[2]), int(argv[3]), argv[4] == "1"
    if engine == THEIRS:
        print(json.dumps(theirs(folder, length, count, reverse)))
        return 0
    from mlx_llama3.errors import UserError

    try:
        print(json.dumps(ours(folder, length, count, reverse)))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def ours(folder: Path, length: int, count: int, reverse: bool) -> dict[str, Any]:
    """Readings of this project with and without the fused kernels; without only if no kernel is in use here.

    In the result, `weights` is the bytes of weights that a token reads, `cache` the bytes of the cache per position.
    """
    from mlx_llama3.api import load_folder
    from mlx_llama3.autotune.trial import matrix_form
    from mlx_llama3.errors import UserError
    from mlx_llama3.generation.stream import generate
    from mlx_llama3.model.cache.memory import bytes_a_token
    from mlx_llama3.model.kernels.kernel_set import REFERENCE

    model, tokenizer = load_folder(folder)
    if length + count + 1 > model.args.max_seq_len:
        context = model.args.max_seq_len
        raise UserError(f"--prompt {length} and --tokens {count} do not fit into the model's context of {context}")
    ban = {token: float("-inf") for token in tokenizer.stop_ids}

    def tokens(ids: list[int], max_tokens: int) -> Iterator[int]:
        return (step.token for step in generate(model, tokenizer, ids, max_tokens=max_tokens, logit_bias=ban))

    kernels = {name: rows.label for name, rows in vars(model.kernels).items()}
    variants = {KERNELS: model.kernels, REFERENCES: REFERENCE} if model.kernels != REFERENCE else {OURS: REFERENCE}
    prompt = _prompt(length, model.args.vocab_size)
    readings: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for variant in _turns(list(variants), reverse):
        model.use(variants[variant])
        readings[variant].append(_measure(tokens, prompt, count))
    read = _weights(model, "output", "tok_embeddings")
    return {
        "readings": readings,
        "weights": dict.fromkeys(variants, read),
        "cache": bytes_a_token(model.args, model.norm.weight.dtype),
        "matrices": matrix_form(model.layers[0].attention.wo),
        "kernels": kernels,
    }


def theirs(folder: Path, length: int, count: int, reverse: bool) -> dict[str, Any]:
    """Readings of mlx-lm, as `ours`."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, config = load_model(folder)
    if mx.default_device() == mx.cpu:
        model.set_dtype(mx.float32)  # the stored 16-bit type is about a hundred times slower on a CPU
    mx.eval(model.parameters())

    def tokens(ids: list[int], max_tokens: int) -> Iterator[int]:
        return (int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=max_tokens))

    prompt = _prompt(length, config["vocab_size"])
    readings = [_measure(tokens, prompt, count) for _ in _turns([THEIRS], reverse)]
    return {"readings": {THEIRS: readings}, "weights": {THEIRS: _weights(model, "lm_head", "embed_tokens")}}


def _turns(variants: list[str], reverse: bool) -> list[str]:
    """Each variant twice, in both orders, so that neither clock-rate drift nor the previous run favours one."""
    order = variants[::-1] if reverse else variants
    return order + order[::-1]


def _measure(tokens: Generate, prompt: list[int], count: int) -> dict[str, float]:
    """Prompt tokens per second up to the first token, and tokens per second after it; a warm-up run comes first."""
    for _ in tokens(prompt, WARM_UP):
        pass
    begin = time.perf_counter()
    stream = tokens(prompt, count + 1)
    next(stream)
    first = time.perf_counter()
    decoded = sum(1 for _ in stream)
    return {"prefill": len(prompt) / (first - begin), "decode": decoded / (time.perf_counter() - first)}


def _prompt(length: int, vocab_size: int) -> list[int]:
    return [(100 + 7 * i) % min(vocab_size, 10_000) for i in range(length)]


def _weights(model: Any, head: str, embedding: str) -> int:
    """Bytes of the weights that a token reads: all but an untied embedding, of which it reads one row."""
    from mlx.utils import tree_flatten

    sizes = {name: weight.nbytes for name, weight in tree_flatten(model.parameters())}
    untied = any(head in name.split(".") for name in sizes)
    return sum(size for name, size in sizes.items() if not (untied and embedding in name.split(".")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
