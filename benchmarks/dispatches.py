"""Counts the GPU dispatches of a function from its graph, on any machine.

`mx.export_function` exports the graph, with each `mx.fast` function as one opaque kernel, as on a GPU (on a CPU MLX
expands it). Every primitive except views is a dispatch; a concatenation is one copy per input.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx_llama3  # first: it puts a fast BLAS in place before MLX is loaded  # noqa: F401

import mlx.core as mx

# Primitives that are views and copy nothing. A reshape copies after a transposition, but not with the single position
# of a decoding pass.
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
# Primitives that `mx.compile` fuses with their neighbours.
ELEMENTWISE = {"Add", "Divide", "Exp", "Multiply", "Negative", "Sigmoid", "Square", "Subtract"}
TWO_PASSES_FROM = (
    1024  # from this number of keys on, MLX's decode attention runs a second kernel to merge partial results
)


def count_dispatches(function: Callable[..., Any], *inputs: mx.array, compiled: bool = False) -> Counter[str]:
    """The dispatches that compute `function(*inputs)`, a tree of arrays: name -> count; a Metal kernel by its own name.

    compiled: count chains of elementwise operations as one dispatch, as `mx.compile` fuses them. The exported graph
    itself has compiled functions expanded.
    """
    nodes: list[dict[str, Any]] = []

    def collect(node: dict[str, Any]) -> None:
        if node["type"] == "primitive" and node["name"] not in VIEWS:
            nodes.append(node)

    with _opaque_fast():
        mx.export_function(collect, function, *inputs)
    fused = _fused(nodes) if compiled else set()
    counts: Counter[str] = Counter()
    for index, node in enumerate(nodes):
        if index not in fused:
            name = _title(node["arguments"][0]) if node["name"] == "CustomKernel" else node["name"]
            counts[name] += len(node["inputs"]) if name == "Concatenate" else 1
    return counts


def _fused(nodes: list[dict[str, Any]]) -> set[int]:
    """The indices of elementwise nodes that are fused into their readers: all of these are elementwise, too."""
    readers: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for name, *_ in node["inputs"]:
            readers[name].append(node["name"])
    return {
        index
        for index, node in enumerate(nodes)
        if node["name"] in ELEMENTWISE
        for names in [readers[node["outputs"][0][0]]]
        if names and all(name in ELEMENTWISE for name in names)
    }


def _title(name: str) -> str:
    """`custom_kernel_llama3_rope_qkv_float_32_...` -> `rope_qkv`: the words before the dtype or the first number."""
    words = name.removeprefix("custom_kernel_").removeprefix("llama3_").split("_")
    title = []
    for word in words:
        if word[:1].isdigit() or word in ("float", "float16", "bfloat16"):
            break
        title.append(word)
    return "_".join(title)


@contextmanager
def _opaque_fast() -> Iterator[None]:
    """Replace the functions of `mx.fast` by single kernels with outputs of the right shape; nothing is computed."""
    originals = {name: getattr(mx.fast, name) for name in ("rms_norm", "rope", "scaled_dot_product_attention")}
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
        for name, function in originals.items():
            setattr(mx.fast, name, function)
