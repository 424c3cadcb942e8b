"""All chosen kernels together, in the model's own decoding step: what counts in the end.

A kernel that is faster alone may cost more than it gains in the host's time, which a trial of its own does not see.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mlx_llama3.autotune.trial import Case, matrix_form
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.kernels.kernel_set import REFERENCE, Kernels

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

if TYPE_CHECKING:
    from mlx_llama3.model.transformer import Transformer

CONTEXT = 16  # tokens before the one that is decoded
READING = 2e9  # bytes of weights to read for one reading of the clock


def step_case(model: "Transformer", kernels: Kernels) -> Case:
    """Decoding one token with these kernels, beside the references; the model is left with either.

    Rounding adds up over the layers, as a random walk does; so the tolerance of one kernel grows with their root.
    """
    bytes_a_step = sum(each.nbytes for _, each in tree_flatten(model.parameters()))
    return Case(
        "whole_step",
        "the model's step",
        (mx.array([[1]]),),
        _step(model, kernels),
        _step(model, REFERENCE),
        lambda _, outputs: (outputs[0].argmax(axis=-1, keepdims=True),),
        model.norm.weight.dtype,
        f"{kernels}{_shapes(model)}",
        calls=max(1, min(16, round(READING / bytes_a_step))),
        slack=4 * len(model.layers) ** 0.5,
        queued=True,
    )


def _step(model: "Transformer", kernels: Kernels) -> Callable[[mx.array], Sequence[mx.array]]:
    """From a token `(1, 1)` to the logits `(1, vocab)` after it, always at the same position, in a cache of its own."""
    cache: list[KVCache] = []

    def step(token: mx.array) -> Sequence[mx.array]:
        if model.kernels != kernels:
            model.use(kernels)
        if not cache:
            cache.extend(model.make_cache())
            mx.eval(model(mx.ones((1, CONTEXT), mx.int32), 0, cache))
        for layer in cache:
            layer.trim(layer.offset - CONTEXT)
        return [model(token, CONTEXT, cache)[:, -1]]

    return step


def _shapes(model: "Transformer") -> str:
    """How many layers, and the forms of their matrices."""
    matrices = [each for each in model.modules() if isinstance(each, nn.Linear | nn.QuantizedLinear)]
    return f"{len(model.layers)}layers,{','.join(sorted({matrix_form(each) for each in matrices}))}"
