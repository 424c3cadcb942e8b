"""Copies of a model that share its weights and hand on what flows through chosen modules.

A tap stands where a module stood and calls it. The model's own code runs unchanged: what is seen is what is computed.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mlx_llama3.model.residual import Residual
from mlx_llama3.model.transformer import Transformer, TransformerBlock

import mlx.core as mx

# Told (layer, name, value); the value it returns goes on in the place of the module's output.
Hook = Callable[[int, str, mx.array], mx.array]

# TransformerLens's names, in the order in which a block makes them, and `z`: what the heads hand to `wo`.
NAMES = ("resid_pre", "z", "attn_out", "resid_mid", "mlp_out", "resid_post")


class Tap:
    """A module whose input or output a hook sees."""

    def __init__(self, module: Any, hook: Callable[[mx.array], mx.array], *, on_input: bool = False) -> None:
        self.module, self._hook, self._on_input = module, hook, on_input

    def __call__(self, x: mx.array | Residual, *rest: Any) -> mx.array | Residual:
        if self._on_input:
            return self.module(_seen(self._hook, x), *rest)
        return _seen(self._hook, self.module(x, *rest))

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # while being copied
            raise AttributeError(name)
        return getattr(self.module, name)


def tapped(model: Transformer, hook: Hook, *, names: tuple[str, ...] = NAMES, layers: Any = None) -> Transformer:
    """A copy of `model`, sharing its weights, in which `hook` is told of `names` in `layers` (default: all).

    The arrays have shape `(B, S, dim)`, `z` `(B, S, n_heads * head_dim)`, in the model's dtype. What the hook returns
    for `attn_out`, `mlp_out`, `z`, `resid_post` and `resid_pre` takes the place of the value; `resid_mid` is only seen,
    because the stream goes past the norm that reads it.
    """
    chosen = range(len(model.layers)) if layers is None else set(layers)
    copied = copy.copy(model)
    # What a hook sees are arrays: the add and the norm apart.
    copied.kernels = replace(model.kernels, add_rms_norm=False)
    copied.layers = [
        _tap_block(block, i, hook, names) if i in chosen else block for i, block in enumerate(model.layers)
    ]
    return copied


def _seen(hook: Callable[[mx.array], mx.array], x: mx.array | Residual) -> mx.array | Residual:
    return x.changed(hook) if isinstance(x, Residual) else hook(x)


def _tap_block(block: TransformerBlock, layer: int, hook: Hook, names: tuple[str, ...]) -> Any:
    def tap(name: str, *, on_input: bool = False) -> Callable[[Any], Any]:
        if name not in names:
            return lambda module: module
        return lambda module: Tap(module, lambda value: hook(layer, name, value), on_input=on_input)

    block = _replace(block, "attention", lambda attention: _replace(attention, "wo", tap("z", on_input=True)))
    block = _replace(block, "attention", tap("attn_out"))
    block = _replace(block, "ffn_norm", tap("resid_mid", on_input=True))
    block = _replace(block, "feed_forward", tap("mlp_out"))
    return tap("resid_post")(tap("resid_pre", on_input=True)(block))


def _replace(module: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """A copy of `module` whose part `name` is `make(part)`; inside the taps that already stand around it."""
    copied = copy.copy(module)
    if isinstance(module, Tap):
        copied.module = _replace(module.module, name, make)
    else:
        setattr(copied, name, make(getattr(module, name)))
    return copied
