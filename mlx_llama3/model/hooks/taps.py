"""Taps: copies of a model, with its weights, that call a hook on the activations of chosen modules.

A tap takes the place of a module and calls it. The model's own code runs unchanged, so a hook gets exactly the values
that the model computes with.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mlx_llama3.model.kernels.kernel_set import ADDING, Rows
from mlx_llama3.model.residual import Residual
from mlx_llama3.model.transformer import Transformer, TransformerBlock

import mlx.core as mx

# Called with (layer, name, value); the value that it returns replaces the activation.
Hook = Callable[[int, str, mx.array], mx.array]

# TransformerLens's names, in the order in which a block computes them. `z` is the input of `wo`, the heads' outputs.
NAMES = ("resid_pre", "z", "attn_out", "resid_mid", "mlp_out", "resid_post")


class Tap:
    """A module with a hook on its output, or on its first input."""

    def __init__(self, module: Any, hook: Callable[[mx.array], mx.array], *, on_input: bool = False) -> None:
        self.module, self._hook, self._on_input = module, hook, on_input

    def __call__(self, x: mx.array | Residual, *rest: Any) -> mx.array | Residual:
        if self._on_input:
            return self.module(_hooked(self._hook, x), *rest)
        return _hooked(self._hook, self.module(x, *rest))

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # `copy.copy` looks for attributes before `module` is set
            raise AttributeError(name)
        return getattr(self.module, name)


def tapped(model: Transformer, hook: Hook, *, names: tuple[str, ...] = NAMES, layers: Any = None) -> Transformer:
    """A copy of `model`, sharing its weights, that calls `hook` for the activations `names` of `layers` (default: all).

    Activations are `(B, S, dim)`, `z` is `(B, S, n_heads * head_dim)`, in the model's dtype. What the hook returns
    replaces the activation, except for `resid_mid`: there only the norm's input changes, not the stream beside it.
    """
    chosen = range(len(model.layers)) if layers is None else set(layers)
    copied = copy.copy(model)
    # Hooks get the stream as an array, so no kernel can do its adds.
    copied.kernels = replace(model.kernels, **dict.fromkeys(ADDING, Rows.NONE))
    copied.layers = [
        _tap_block(block, i, hook, names) if i in chosen else block for i, block in enumerate(model.layers)
    ]
    return copied


def _hooked(hook: Callable[[mx.array], mx.array], x: mx.array | Residual) -> mx.array | Residual:
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
    """A copy of `module` with `make(part)` for its part `name`; if `module` is a tap, in the module inside it."""
    copied = copy.copy(module)
    if isinstance(module, Tap):
        copied.module = _replace(module.module, name, make)
    else:
        setattr(copied, name, make(getattr(module, name)))
    return copied
