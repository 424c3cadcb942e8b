"""What a pass of a model asks of a GPU, counted from its graph, on any machine.

A graph is recorded with `mx.export_function` while each `mx.fast` function is one opaque kernel, as it is on a GPU (on
a CPU MLX takes it apart). Every primitive is a dispatch but for views; a concatenation copies each of its parts.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx_llama3  # first: it puts a fast BLAS in place before MLX is loaded  # noqa: F401

import mlx.core as mx

# Primitives that only look at memory in another way. A reshape copies where axes were moved before; of the single
# position that a decoding pass has, none are.
VIEWS = {
    "AsStrided",
    "Broadcast",
    "BroadcastAxes",
    "ExpandDims",
    "Flatten",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "StopGradient",
    "Transpose",
    "Unflatten",
}
# What `mx.compile` joins with its neighbours.
ELEMENTWISE = {"Add", "Divide", "Exp", "Multiply", "Negative", "Sigmoid", "Square", "Subtract"}
TWO_PASSES_FROM = 1024  # keys from which MLX's decode attention needs a second kernel, which joins its parts


def recorded(function: Callable[..., Any], *inputs: mx.array, compiled: bool = False) -> Counter[str]:
    """Dispatches by name of what `function(*inputs)` returns, a tree of arrays; a metal kernel by its own name.

    `compiled`: elementwise operations of which one feeds only others are one dispatch, as `mx.compile` makes them.
    While a graph is recorded, what is compiled in it is taken apart.
    """
    nodes: list[dict[str, Any]] = []

    def collect(node: dict[str, Any]) -> None:
        if node["type"] == "primitive" and node["name"] not in VIEWS:
            nodes.append(node)

    with _opaque_fast():
        mx.export_function(collect, function, *inputs)
    joined = _joined(nodes) if compiled else set()
    counts: Counter[str] = Counter()
    for index, node in enumerate(nodes):
        if index not in joined:
            name = _title(node["arguments"][0]) if node["name"] == "CustomKernel" else node["name"]
            counts[name] += len(node["inputs"]) if name == "Concatenate" else 1
    return counts


def _joined(nodes: list[dict[str, Any]]) -> set[int]:
    """Those that are done with the operation that reads them: all that read them are elementwise, as they are."""
    readers: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for name, *_ in node["inputs"]:
            readers[name].append(node["name"])
    return {
        index
        for index, node in enumerate(nodes)
        if node["name"] in ELEMENTWISE
        for reading in [readers[node["outputs"][0][0]]]
        if reading and all(name in ELEMENTWISE for name in reading)
    }


def _title(name: str) -> str:
    """`rope_qkv` of `custom_kernel_llama3_rope_qkv_float_32_...`: up to the type or the first number."""
    words = name.removeprefix("custom_kernel_").removeprefix("llama3_").split("_")
    kept = []
    for word in words:
        if word[:1].isdigit() or word in ("float", "float16", "bfloat16"):
            break
        kept.append(word)
    return "_".join(kept)


@contextmanager
def _opaque_fast() -> Iterator[None]:
    """`mx.fast`'s functions as single kernels with outputs of the right shape; nothing is computed."""
    kept = {name: getattr(mx.fast, name) for name in ("rms_norm", "rope", "scaled_dot_product_attention")}
    make = mx.fast.metal_kernel

    def opaque(name: str, inputs: Sequence[mx.array], like: mx.array) -> mx.array:
        names = [f"in{i}" for i in range(len(inputs))]
        kernel = make(name=name, input_names=names, output_names=["out"], source="out[0] = in0[0];")
        one = (1, 1, 1)
        (out,) = kernel(
            inputs=list(inputs), grid=one, threadgroup=one, output_shapes=[like.shape], output_dtypes=[like.dtype]
        )
        return out

    def attention(q: mx.array, k: mx.array, v: mx.array, **_options: Any) -> mx.array:
        out = opaque("attention", [q, k, v], q)
        return opaque("attention_join", [out], q) if k.shape[2] >= TWO_PASSES_FROM else out

    mx.fast.rms_norm = lambda x, weight, eps: opaque("rms_norm", [x, weight], x)
    mx.fast.rope = lambda x, *_dims, **_options: opaque("rope", [x], x)
    mx.fast.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(mx.fast, name, function)
