"""Trial cases for the kernels: a loaded model's own weights, and random activations of its shapes and types."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from mlx_llama3.autotune.cache_case import cache_cases
from mlx_llama3.autotune.trial import Case, matrix_form
from mlx_llama3.model.cache.quantized import QuantizedKVCache
from mlx_llama3.model.cache.settings import KV_BITS
from mlx_llama3.model.kernels import (
    add_rms_norm,
    norm_rope_qkv,
    norm_swiglu_qmv,
    rope_qkv,
    sdpa_quantized,
    swiglu_qmv,
)
from mlx_llama3.model.kernels.kernel_set import Rows
from mlx_llama3.model.kernels.kv_packing import PackedLayout, pack
from mlx_llama3.model.layers.packed_linear import PackedLinear

import mlx.core as mx
from mlx.utils import tree_flatten

if TYPE_CHECKING:
    from mlx_llama3.model.transformer import Transformer

CONTEXT = 1000  # positions before the one that is decoded
# Positions of a pass, its label, and the number of consecutive calls that are timed. The positions are odd, so that
# the kernels' edge handling is tested too.
PASSES = ((1, "one token", 48), (3, "a draft of 3 tokens", 48), (257, "a prompt of 257 tokens", 8))

# Packed positions of a quantized cache (401: the kernel runs in one piece; 1900: it splits them), and the unpacked
# positions at its end.
PACKED = (401, 1900)
DENSE = 100


def model_cases(model: "Transformer") -> dict[str, list[Case]]:
    """The trial cases of each kernel, by its name. Unsupported shapes are left out; the reference handles them."""
    makers: dict[str, Callable[[Transformer], Iterator[Case]]] = {
        "add_rms_norm": _add_rms_norm,
        "rope_qkv": _rope_qkv,
        "swiglu_qmv": _swiglu_qmv,
        "sdpa_quantized": _sdpa_quantized,
        # After the kernels whose work they do, because they are also compared with these.
        "norm_rope_qkv": _norm_rope_qkv,
        "norm_swiglu_qmv": _norm_swiglu_qmv,
        "double_buffer": cache_cases,
    }
    return {kernel: list(make(model)) for kernel, make in makers.items()}


def _add_rms_norm(model: "Transformer") -> Iterator[Case]:
    norm = model.layers[0].ffn_norm
    for length, label, calls in PASSES:
        shape = (1, length, model.args.dim)
        inputs = (_random(model, shape, 0), _random(model, shape, 1), norm.weight)
        if add_rms_norm.takes(*inputs):
            yield Case(
                "add_rms_norm",
                label,
                inputs,
                partial(add_rms_norm.fused, eps=norm.eps),
                partial(add_rms_norm.reference, eps=norm.eps),
                lambda inputs, outputs: (outputs[0], outputs[1], inputs[2]),
                norm.weight.dtype,
                calls=calls,
                rows=Rows.of(length),
            )


def _rope_qkv(model: "Transformer") -> Iterator[Case]:
    args = model.args
    width = (args.n_heads + 2 * args.n_kv_heads) * args.head_dim
    for length, label, calls in PASSES:
        qkv = _random(model, (1, length, width), 2)
        rest = (args.n_heads, args.n_kv_heads, CONTEXT, model.rope.frequencies(CONTEXT, length, table=False))
        if rope_qkv.takes(qkv, *rest):
            yield Case(
                "rope_qkv",
                label,
                (qkv,),
                lambda qkv, rest=rest: rope_qkv.fused(qkv, *rest),
                lambda qkv, rest=rest: rope_qkv.reference(qkv, *rest),
                lambda inputs, outputs: (_concatenated(outputs[0], outputs[1], inputs[0].shape),),
                qkv.dtype,
                f"heads{rest[:2]}",
                calls,
                rows=Rows.of(length),
            )


def _concatenated(q: mx.array, kv: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Queries, keys and values as one array `(1, S, width)` again. Their order does not matter: only time counts."""
    return mx.concatenate([q.reshape(*shape[:2], -1), kv.reshape(*shape[:2], -1)], axis=-1)


def _swiglu_qmv(model: "Transformer") -> Iterator[Case]:
    """Cases for each storage form of the weights, since a quantization recipe may give layers different bits.

    Consecutive calls use the weights of one layer after the other, so that the chip's caches do not hold them; a
    running model does not have them cached either.
    """
    for form, weights in _forms(layer.feed_forward.w13 for layer in model.layers):
        for length, label, calls in PASSES:
            x = _random(model, (1, length, model.args.dim), 3)
            if swiglu_qmv.takes(weights[0], x):
                yield Case(
                    "swiglu_qmv",
                    label,
                    (x, 0),
                    lambda x, i, weights=weights: [swiglu_qmv.fused(weights[i % len(weights)], x)],
                    lambda x, i, weights=weights: [swiglu_qmv.reference(weights[i % len(weights)], x)],
                    lambda inputs, outputs: (_first_columns(outputs[0], inputs[0]), inputs[1] + 1),
                    x.dtype,
                    form,
                    calls // 3,
                    rows=Rows.of(length),
                )


def _forms(matrices: Iterable[PackedLinear]) -> Iterable[tuple[str, list[PackedLinear]]]:
    """The matrices by their storage form."""
    forms: dict[str, list[PackedLinear]] = {}
    for packed in matrices:
        forms.setdefault(",".join(matrix_form(part) for part in packed.parts), []).append(packed)
    return forms.items()


def _norm_swiglu_qmv(model: "Transformer") -> Iterator[Case]:
    def apart(*inputs: Any) -> tuple[mx.array, ...]:
        *stream, w13 = inputs
        h, normed, squares = add_rms_norm.fused(*stream)
        return h, swiglu_qmv.fused(w13, normed), squares

    for form, weights in _forms(layer.feed_forward.w13 for layer in model.layers):
        yield from _norm_product(
            *(model, norm_swiglu_qmv, form, weights),
            {(): norm_swiglu_qmv.reference, ("add_rms_norm", "swiglu_qmv"): apart},
            lambda x, out: _first_columns(out, x),
        )


def _norm_rope_qkv(model: "Transformer") -> Iterator[Case]:
    def apart(*inputs: Any) -> tuple[Any, ...]:
        *stream, wqkv, n_heads, n_kv_heads, start_pos, freqs = inputs
        h, normed, squares = add_rms_norm.fused(*stream)
        return h, rope_qkv.fused(wqkv.packed(normed), n_heads, n_kv_heads, start_pos, freqs), squares

    args = model.args
    for form, weights in _forms(layer.attention.wqkv for layer in model.layers):
        yield from _norm_product(
            *(model, norm_rope_qkv, form, weights),
            {(): norm_rope_qkv.reference, ("add_rms_norm", "rope_qkv"): apart},
            lambda x, q, kv: _first_columns(_concatenated(q, kv, x.shape), x),
            lambda length: (
                args.n_heads,
                args.n_kv_heads,
                CONTEXT,
                model.rope.frequencies(CONTEXT, length, table=False),
            ),
        )


def _norm_product(
    model: "Transformer",
    kernel: Any,
    form: str,
    weights: list[PackedLinear],
    references: Mapping[tuple[str, ...], Callable[..., Any]],
    update: Callable[..., mx.array],
    rest: Callable[[int], tuple[Any, ...]] = lambda length: (),
) -> Iterator[Case]:
    """The cases of a kernel that adds, norms and multiplies, with the weights of one layer after the other.

    references: by the other kernels that they run. update: from the stream and the kernel's other results to the next
    update. rest: what the kernel takes after the matrix, for a number of positions.
    """
    norm = model.layers[0].ffn_norm
    name = kernel.__name__.rpartition(".")[2]
    for (length, label, calls), (beside, reference) in product(PASSES[:2], references.items()):
        shape = (1, length, model.args.dim)
        inputs = (_random(model, shape, 7), _random(model, shape, 8), norm.weight)
        if not kernel.takes(*inputs, weights[0], *rest(length)):
            continue

        def call(function: Callable[..., Any], *inputs: Any, rest: tuple[Any, ...] = rest(length)) -> list[mx.array]:
            *stream, index = inputs
            outputs = function(*stream, norm.eps, weights[index % len(weights)], *rest)
            return [array for _, array in tree_flatten(outputs)]

        yield Case(
            name,
            label + (", beside the kernels apart" if beside else ""),
            (*inputs, 0),
            partial(call, kernel.fused),
            partial(call, reference),
            lambda inputs, outputs: (outputs[0], update(outputs[0], *outputs[1:-1]), inputs[2], inputs[3] + 1),
            norm.weight.dtype,
            ",".join([form, *beside]),
            calls // 3,
            rows=Rows.of(length),
            beside=beside,
        )


def _first_columns(y: mx.array, x: mx.array) -> mx.array:
    """The first columns of y `(1, S, hidden_dim)`, as many as x has; x itself if `hidden_dim` is less than that."""
    return y[..., : x.shape[-1]] if y.shape[-1] >= x.shape[-1] else x


def _sdpa_quantized(model: "Transformer") -> Iterator[Case]:
    args = model.args
    if args.head_dim not in sdpa_quantized.HEAD_DIMS:
        return
    for bits, packed in product(KV_BITS, PACKED):
        layout = PackedLayout(args.head_dim, bits)
        kv_shape = (2, 1, args.n_kv_heads)
        packed_kv = pack(_random(model, (*kv_shape, packed, args.head_dim), 4), layout)
        dense = _random(model, (*kv_shape, QuantizedKVCache.ROOM, args.head_dim), 5)
        for length, label, calls in PASSES[:2]:
            q = _random(model, (1, args.n_heads, length, args.head_dim), 6)
            rest = ((DENSE, packed), args.head_dim**-0.5, layout)
            if sdpa_quantized.takes(q, dense, packed_kv, layout):
                yield Case(
                    "sdpa_quantized",
                    f"{label} after {packed} in {bits} bits",
                    (q, dense, packed_kv),
                    lambda *arrays, rest=rest: [sdpa_quantized.fused(*arrays, *rest)],
                    lambda *arrays, rest=rest: [sdpa_quantized.reference(*arrays, *rest)],
                    lambda inputs, outputs: (outputs[0], *inputs[1:]),
                    q.dtype,
                    calls=calls // 3,
                    rows=Rows.of(length),
                )


def _dtype(model: "Transformer") -> mx.Dtype:
    """The dtype of the activations."""
    return model.norm.weight.dtype


def _random(model: "Transformer", shape: tuple[int, ...], seed: int) -> mx.array:
    """Normally distributed values of `shape` in the activations' dtype, the same for the same seed; lazy."""
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(_dtype(model))
