"""One rank of a test: `python rank_program.py split|pipeline|alone SCENARIO FOLDER...` prints JSON on rank 0.

"alone" runs the same in one process without `mx.distributed`, for comparison with the sharded model.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import mlx_llama3  # first: it puts a fast BLAS in place before MLX is loaded  # noqa: F401
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.generation.decoding import prefill
from mlx_llama3.generation.sampling import Sampler, Sampling
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.hooks.edits import Scale, edited
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.parallel.rank0 import this_rank0
from mlx_llama3.parallel.worker import run_worker
from mlx_llama3.parallel.world import world
from mlx_llama3.trace.attention import attention_from
from mlx_llama3.trace.neurons import neurons
from mlx_llama3.trace.position import Position, look

import mlx.core as mx

PROMPT = [5, 17, 200, 3, 319, 42, 42, 0, 7, 311]


def few(model: Transformer) -> dict:
    """Logits of a full pass and of one in chunks; greedy tokens."""
    cache = model.make_cache()
    results = {"whole": model(mx.array([PROMPT]))[0], "chunks": prefill(model, PROMPT, cache, chunk=8)}
    tokens = sample(model, results["chunks"], cache, Sampling(), 3)
    return {name: value.tolist() for name, value in results.items()} | {"greedy": tokens}


def passes(model: Transformer) -> dict:
    """Logits of every kind of pass: full, in chunks, token by token, after a trim, of a batch, of a copied cache."""
    results = {"whole": model(mx.array([PROMPT]))[0], "batch": model(mx.array([PROMPT[:4], PROMPT[4:8]]))}
    cache = model.make_cache()
    results["chunks"] = prefill(model, PROMPT, cache, chunk=4)
    tokens = sample(model, results["chunks"], cache, Sampling(), 5)
    for entry in cache:
        entry.trim(4)
    results["trimmed"] = model(mx.array([[9, 8]]), cache[0].offset, cache)
    copy = [entry.prefix(4) for entry in cache]
    results["copy"] = model(mx.array([[1]]), 4, copy)
    results["after copy"] = model(mx.array([[2]]), cache[0].offset, cache)
    window = model.make_cache(CacheSettings(max_kv_size=8))
    results["window"] = prefill(model, PROMPT * 2, window, chunk=4)
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=7)
    drawn = sample(model, prefill(model, PROMPT, cache := model.make_cache()), cache, sampling, 6)
    return {name: value.tolist() for name, value in results.items()} | {"greedy": tokens, "drawn": drawn}


def sample(model: Transformer, logits: mx.array, cache: list, sampling: Sampling, count: int) -> list[int]:
    """Tokens, generated as by `decoding.decode`: the pass of a token is queued before its id is known."""
    sampler, tokens = Sampler(sampling, model.args.vocab_size), []
    for _ in range(count):
        token, _ = sampler(logits)
        logits = model(token[:, None], cache[0].offset, cache)[:, -1]
        mx.async_eval(logits)
        tokens.append(token.item())
    return tokens


def looking(model: Transformer) -> dict:
    """Interpretability on a sharded model: states and lens work, single heads and edits are refused."""
    position = look(model, PROMPT, 6)
    results = {"resid_post": position.states["resid_post"].tolist(), "lens": position.logits.tolist()}
    if not model.is_whole:
        results |= {name: refusal(call) for name, call in refused(model, position).items()}
    # No rank waits for another: the next pass gives the same logits as the first.
    results["again"] = model(mx.array([PROMPT]))[0].tolist()
    return results


def refused(model: Transformer, position: Position) -> dict:
    """Calls that must be refused before anything runs."""
    return {
        "heads": lambda: attention_from(position, 0),
        "neurons": lambda: neurons(position, 0),
        "edits": lambda: edited(model, [Scale(0, "mlp")]),
        "matrix": lambda: model.layers[0].feed_forward.w2(mx.zeros((1, 1, 64))),
        "weight": lambda: model.tok_embeddings.weight,
        "foreign cache": lambda: model(mx.array([[1]]), 0, [KVCache() for _ in model.layers]),
        "start": lambda: model(mx.array([[1]]), 3, model.make_cache()),
    }


def refusal(call: Callable[[], object]) -> str:
    try:
        return f"no error, but {call()}"
    except ValueError as error:  # `UserError` is one
        return str(error)


def memory(model: Transformer) -> dict:
    """Peak memory of loading the model and one pass, and bytes read from disk for it."""
    mx.eval(model(mx.array([PROMPT])))
    return {"peak": mx.get_peak_memory(), "read": read_bytes() - BEFORE}


def forever(model: Transformer) -> dict:
    """Decode endlessly; prints "running" on standard error after the first tokens."""
    cache = model.make_cache()
    logits = prefill(model, PROMPT, cache)
    sample(model, logits, cache, Sampling(), 3)
    print("running", file=sys.stderr, flush=True)
    while True:
        for entry in cache:
            entry.trim(entry.offset - len(PROMPT))
        sample(model, logits, cache, Sampling(), 100)


def idle(model: Transformer) -> dict:
    """Wait for standard input, like a prompt."""
    mx.eval(model(mx.array([PROMPT])))
    print("running", file=sys.stderr, flush=True)
    sys.stdin.read()
    return {}


def read_bytes() -> int:
    """Bytes that this process has read so far; 0 if the kernel does not count them."""
    counts = Path("/proc/self/io")
    return int(counts.read_text().split()[1]) if counts.exists() else 0


def main() -> None:
    split, scenario, *folders = sys.argv[1:]
    run = {function.__name__: function for function in (few, passes, looking, memory, forever, idle)}[scenario]
    if split == "alone":
        print(json.dumps([run(load_model(folder)) for folder in folders]))
        return
    if world().rank:
        run_worker(world(), Path)
        if scenario == "memory":
            results = {"peak": mx.get_peak_memory(), "read": read_bytes() - BEFORE}
            Path(os.environ["WORKER_REPORT"]).write_text(json.dumps(results))
        return
    rank0 = this_rank0()
    rank0.pipeline = split == "pipeline"
    with rank0.world.connections.watched(0):
        try:
            results = [run(rank0.load_model("", Path(folder))) for folder in folders]
        finally:
            rank0.end()
    print(json.dumps(results))


BEFORE = read_bytes()
if __name__ == "__main__":
    main()
