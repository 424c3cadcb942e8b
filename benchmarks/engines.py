"""Measures one engine in its own process, for `side_by_side.py`, so that engines share no BLAS and no warm cache.

    python benchmarks/engines.py ENGINE MODEL PLAN STARTED

MODEL: a model folder, or for llama.cpp a GGUF file. PLAN: JSON, {"prefill": [lengths], "decode": [contexts], "tokens":
count}. STARTED: the time at which the process was started. Prints one JSON object: seconds to load, seconds to the
first token (both from the start of the process), tokens per second of each prompt and at each context, peak memory.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

FIRST_PROMPT = 64
THREADS = 2
# llama.cpp uses a CPU's matrix tiles (AMX) even where a virtual machine forbids them, and crashes.
NO_TILES = "BENCH_WITHOUT_TILES"


class Engine(Protocol):
    """A loaded model of one engine. Its methods return when their result is computed."""

    def prefill(self, length: int) -> None:
        """Prefill an empty cache with `length` ids, and choose the next token."""

    def decode(self, context: int, count: int) -> Callable[[], None]:
        """Fill a cache with `context` positions; returns a function that then decodes `count` tokens."""


def prompt(length: int) -> list[int]:
    return [100 + 7 * i % 10000 for i in range(length)]


class Ours:
    """This project, with its own prefill and decode loops."""

    def __init__(self, path: Path) -> None:
        from mlx_llama3.checkpoint.loading import load_model

        self.model = load_model(path)

    def prefill(self, length: int) -> None:
        from mlx_llama3.generation.decoding import prefill

        import mlx.core as mx

        mx.eval(prefill(self.model, prompt(length), self.model.make_cache()).argmax(-1))

    def decode(self, context: int, count: int) -> Callable[[], None]:
        from mlx_llama3.generation.decoding import decode
        from mlx_llama3.generation.sampling import Sampler, Sampling

        import mlx.core as mx

        cache, args = self.model.make_cache(), self.model.args
        kv = mx.random.normal((2, 1, args.n_kv_heads, context, args.head_dim))
        for entry in cache:
            entry.update_and_fetch(kv)
        mx.eval([entry.state for entry in cache])
        logits = mx.zeros((1, args.vocab_size))
        sampler = Sampler(Sampling(), args.vocab_size, [])

        def run() -> None:
            for choice in decode(self.model, logits, cache, sampler, count=count):
                choice.token.item()

        return run


class MlxLm:
    """mlx-lm's `generate_step`; on a CPU with float32 weights, because a prompt takes minutes with 16-bit ones."""

    def __init__(self, path: Path) -> None:
        import mlx.core as mx
        from mlx_lm.utils import load_model

        self.model, self.config = load_model(path)
        if mx.default_device() == mx.cpu:
            self.model.set_dtype(mx.float32)
        mx.eval(self.model.parameters())

    def _step(self, ids: list[int], count: int, cache: Any) -> None:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        for token, _ in generate_step(mx.array(ids), self.model, max_tokens=count, prompt_cache=cache):
            int(token)

    def prefill(self, length: int) -> None:
        self._step(prompt(length), 1, None)

    def decode(self, context: int, count: int) -> Callable[[], None]:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(self.model)
        heads, width = self.model.args.num_key_value_heads, self.model.args.head_dim
        width = width or self.model.args.hidden_size // self.model.args.num_attention_heads
        kv = mx.random.normal((1, heads, context, width))
        for entry in cache:
            entry.update_and_fetch(kv, kv)
        mx.eval([entry.state for entry in cache])
        return lambda: self._step([100], count, cache)


class LlamaCpp:
    """llama.cpp through llama-cpp-python."""

    def __init__(self, path: Path) -> None:
        from llama_cpp import Llama, llama_cpp

        if os.environ.get(NO_TILES):
            params = llama_cpp.llama_model_default_params()
            params.use_extra_bufts = False
            llama_cpp.llama_model_default_params = lambda: params
        self.llama = Llama(
            str(path), n_ctx=4352, n_batch=512, n_threads=THREADS, n_threads_batch=THREADS, verbose=False, use_mmap=True
        )

    def _next(self) -> int:
        return self.llama.sample(temp=0.0)

    def prefill(self, length: int) -> None:
        self.llama.reset()
        self.llama.eval(prompt(length))
        self._next()

    def decode(self, context: int, count: int) -> Callable[[], None]:
        self.prefill(context)

        def run() -> None:
            for _ in range(count):
                self.llama.eval([self._next()])

        return run


class Transformers:
    """transformers on torch, float32, its default attention."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(THREADS)
        torch.set_grad_enabled(False)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def prefill(self, length: int) -> None:
        import torch

        self.model(torch.tensor([prompt(length)]), use_cache=True, logits_to_keep=1).logits.argmax(-1).item()

    def decode(self, context: int, count: int) -> Callable[[], None]:
        import torch
        from transformers import DynamicCache

        config = self.model.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache, kv = DynamicCache(config=config), torch.randn(1, config.num_key_value_heads, context, width)
        for layer in range(config.num_hidden_layers):
            cache.update(kv.clone(), kv.clone(), layer)

        def run() -> None:
            token = torch.tensor([[100]])
            for _ in range(count):
                token = self.model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                token.item()

        return run


ENGINES: dict[str, type[Engine]] = {
    "mlx-llama3": Ours,
    "mlx-lm": MlxLm,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}


def measure(name: str, path: Path, plan: dict[str, Any], started: float) -> dict[str, Any]:
    """Measure everything in `plan`, in its order."""
    engine = ENGINES[name](path)
    results: dict[str, Any] = {"load": time.time() - started}
    engine.prefill(FIRST_PROMPT)
    results["first"] = time.time() - started
    results["prefill"] = {length: _rate(lambda n=length: engine.prefill(n), length) for length in plan["prefill"]}
    results["decode"] = {}
    for context in plan["decode"]:
        run = engine.decode(context, plan["tokens"])
        results["decode"][context] = _rate(run, plan["tokens"])
    unit = 1 if sys.platform == "darwin" else 1024
    return results | {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def _rate(run: Callable[[], None], tokens: int) -> float:
    begin = time.perf_counter()
    run()
    return tokens / (time.perf_counter() - begin)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), float(sys.argv[4]))))
