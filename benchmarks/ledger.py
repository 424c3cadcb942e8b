"""What the fused kernels save, without a GPU: dispatches, bytes, errors, and the time to build a token's graph.

    python -m benchmarks.ledger

Dispatches are counted from exported graphs. Bytes and values come from the kernels' Metal source, run on the CPU by
`tests/metal_harness`. Only building the graph is timed, alternating with mlx-lm's llama (pip install mlx-lm).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.dispatches import count_dispatches
from benchmarks.ledger_models import WIDTHS, filled, ours, step, theirs
from mlx_llama3.model.hooks.norms import NormCapture
from mlx_llama3.model.kernels.kernel_set import FUSED, REFERENCE, Rows

import mlx.core as mx

SHORT, LONG = 100, 2000  # positions in the cache
ROUNDS, TOKENS = 15, 10
# The kernels without those that do the work of several.
APART = replace(FUSED, norm_rope_qkv=Rows.NONE, norm_swiglu_qmv=Rows.NONE)


def dispatches_per_layer(
    make: Callable[[int], Any], used: int, *, norms: bool = False, compiled: bool = False
) -> Counter[str]:
    """The dispatches of one layer: those of a model with three layers minus those of one with two.

    make: number of layers -> model. used: positions in its cache. norms: with live norms. compiled: as for
    `count_dispatches`.
    """
    three, two = (_pass(make(n), n, used, norms, compiled) for n in (3, 2))
    three.subtract(two)
    return +three


def _pass(model: Any, n_layers: int, used: int, norms: bool, compiled: bool) -> Counter[str]:
    cache = filled(WIDTHS["demo"], n_layers, used, theirs=not hasattr(model, "kernels"))
    mx.eval([state for entry in cache for state in _buffers(entry)])
    capture = NormCapture(model) if norms else None
    decode = step(capture.model if capture else model, cache)

    def outputs(token: mx.array) -> list[mx.array]:
        logits = decode(token)
        squares = [square for position in capture.take() for square in position.squares] if capture else []
        return [logits, *(state for entry in cache for state in _buffers(entry)), *squares]

    return count_dispatches(outputs, mx.zeros((1, 1), mx.int32), compiled=compiled)


def _buffers(entry: Any) -> list[mx.array]:
    """The arrays of this project's or mlx-lm's cache."""
    return list(entry.state) if isinstance(entry.state, list) else [entry.keys, entry.values]


def print_dispatches() -> None:
    """Print the dispatches, one line per model and context."""
    widths = WIDTHS["demo"]
    print("dispatches per layer and token (attention to 1024 keys or more takes a second one)")
    for used in (SHORT, LONG):
        counts = {
            "fused, live norms": dispatches_per_layer(lambda n: ours(widths, n, FUSED), used, norms=True),
            "fused apart, live norms": dispatches_per_layer(lambda n: ours(widths, n, APART), used, norms=True),
            "references, compiled": dispatches_per_layer(lambda n: ours(widths, n, REFERENCE), used, compiled=True),
            "mlx-lm": dispatches_per_layer(lambda n: theirs(widths, n), used, compiled=True),
        }
        for name, count in counts.items():
            parts = ", ".join(f"{kind} {number}" for kind, number in sorted(count.items()))
            print(f"  {used:>5} positions  {name:<24} {count.total():>3}   {parts}")


@contextmanager
def _cheap_fast() -> Iterator[None]:
    """Replace each function of `mx.fast` by one small operation, as on a GPU; on a CPU it is a dozen operations."""
    stand_ins = {
        "rms_norm": lambda x, weight, _eps: x * weight,
        "rope": lambda x, *_dims, **_options: x + x,
        "scaled_dot_product_attention": lambda q, _k, _v, **_options: q + q,
    }
    originals = {name: getattr(mx.fast, name) for name in stand_ins}
    for name, function in stand_ins.items():
        setattr(mx.fast, name, function)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(mx.fast, name, function)


def building(width: str, n_layers: int) -> dict[str, float]:
    """Milliseconds to build the graph of a token without evaluating it: medians of alternating rounds.

    It runs inside `mx.export_function`, where Metal kernels can be called without Metal.
    """
    widths = WIDTHS[width]
    models = {
        "fused, compiled, live norms": NormCapture(ours(widths, n_layers, FUSED, compiles=True)),
        "fused, compiled": ours(widths, n_layers, FUSED, compiles=True),
        "fused apart, compiled, live norms": NormCapture(ours(widths, n_layers, APART, compiles=True)),
        "fused apart, compiled": ours(widths, n_layers, APART, compiles=True),
        "fused, not compiled": ours(widths, n_layers, FUSED),
        "fused apart, not compiled": ours(widths, n_layers, APART),
        "references, compiled": ours(widths, n_layers, REFERENCE, compiles=True),
        "references, not compiled": ours(widths, n_layers, REFERENCE),
        "mlx-lm": theirs(widths, n_layers),
    }
    seconds: dict[str, list[float]] = {name: [] for name in models}

    def rounds(x: mx.array) -> mx.array:
        for _ in range(ROUNDS):
            for name, model in models.items():
                cache = filled(widths, n_layers, SHORT, theirs=name == "mlx-lm")
                seconds[name].append(_seconds(model, cache))
        return x + 1

    with _cheap_fast():
        mx.export_function(lambda node: None, rounds, mx.zeros(1))
    return {name: 1e3 * median(values) for name, values in seconds.items()}


def _seconds(model: Any, cache: list[Any]) -> float:
    """Seconds to build a token's graph, after a first token, which compiles the blocks."""
    capture = model if isinstance(model, NormCapture) else None
    decode, token = step(capture.model if capture else model, cache), mx.zeros((1, 1), mx.int32)
    decode(token)
    begin = perf_counter()
    for _ in range(TOKENS):
        decode(token)
        if capture:
            capture.take()
    return (perf_counter() - begin) / TOKENS


def print_building() -> None:
    """Print the build times, for each width and depth."""
    print("\nbuilding a token's graph, ms (median of alternating rounds), and as a share of mlx-lm's")
    for width in ("1B", "8B"):
        for n_layers in (16, 32):
            times = building(width, n_layers)
            for name, value in times.items():
                print(f"  {width} widths, {n_layers} layers  {name:<34} {value:6.2f}  {value / times['mlx-lm']:.2f}")


def main() -> None:
    """Print the ledger."""
    from benchmarks.ledger_bytes import print_bytes_and_errors

    print_dispatches()
    print_building()
    print_bytes_and_errors()


if __name__ == "__main__":
    main()
