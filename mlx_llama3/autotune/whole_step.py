"""The trial of all chosen kernels together, in the model's own decoding step.

A kernel that is faster alone may cost more host time than it gains, which the trial of one kernel does not measure.
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
TIMED_BYTES = 2e9  # weights that the steps of one timing read together


def step_case(model: "Transformer", kernels: Kernels) -> Case:
    """A case that decodes one token with these kernels and with the references. The model is left with either of them.

    Rounding errors add up over the layers like a random walk, so the tolerance grows with the square root of their
    number.
    """
    bytes_per_step = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return Case(
        "whole_step",
        "the model's step",
        (mx.array([[1]]),),
        _step(model, kernels),
        _step(model, REFERENCE),
        lambda _, outputs: (outputs[0].argmax(axis=-1, keepdims=True),),
        model.norm.weight.dtype,
        f"{kernels}{stored_shapes(model)}",
        calls=max(1, min(16, round(TIMED_BYTES / bytes_per_step))),
        slack=4 * len(model.layers) ** 0.5,
        queued=True,
    )


def _step(model: "Transformer", kernels: Kernels) -> Callable[[mx.array], Sequence[mx.array]]:
    """A function from a token `(1, 1)` to its logits `(1, vocab)`, always at the same position, with its own cache."""
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


def stored_shapes(model: "Transformer") -> str:
    """The number of layers and the storage forms of the matrices, for the key."""
    matrices = [module for module in model.modules() if isinstance(module, nn.Linear | nn.QuantizedLinear)]
    return f"{len(model.layers)}layers,{','.join(sorted({matrix_form(matrix) for matrix in matrices}))}"
