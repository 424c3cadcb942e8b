"""Edits of activations: scale a branch, silence a head, or add a steering vector. The model itself never changes.

quiet = edited(model, [Scale(3, "attention", 0.0), Scale(5, "head", 0.0, head=2), Add(7, vector)])
for step in generate(quiet, tokenizer, ids): ...
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_llama3.errors import UserError
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.model.hooks.taps import tapped
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx

BRANCHES = ("attention", "mlp", "head")
_POINTS = {"attention": "attn_out", "mlp": "mlp_out", "head": "z"}


@dataclass(frozen=True)
class Scale:
    """Multiply the output of a branch of `layer` by `factor` (0 silences it).

    branch: "attention", "mlp", or "head" for the attention head number `head`.
    """

    layer: int
    branch: str
    factor: float = 0.0
    head: int | None = None


@dataclass(frozen=True)
class Add:
    """Add `vector` `(dim,)`, times `factor`, to the residual stream after `layer`, at every position."""

    layer: int
    vector: "np.ndarray | mx.array"
    factor: float = 1.0


Edit = Scale | Add


def edited(model: Transformer, edits: Sequence[Edit]) -> Transformer:
    """A copy of `model` that shares its weights and applies `edits`; use it wherever a model is used.

    Edits of the same activation are applied in their order.

    Raises:
        UserError: no such layer, branch or head; a vector of the wrong length; a factor that is not finite; a sharded
            model.
    """
    by_point: dict[tuple[int, str], list[Edit]] = defaultdict(list)
    for edit in edits:
        _check(edit, model.args)
        name = _POINTS[edit.branch] if isinstance(edit, Scale) else "resid_post"
        by_point[edit.layer, name].append(edit)

    def apply(layer: int, name: str, value: mx.array) -> mx.array:
        for edit in by_point.get((layer, name), ()):
            value = _applied(edit, value, model.args)
        return value

    if not by_point:
        return copy.copy(model)
    model.need_whole()
    names = tuple({name for _, name in by_point})
    return tapped(model, apply, names=names, layers={layer for layer, _ in by_point})


def _applied(edit: Edit, value: mx.array, args: ModelArgs) -> mx.array:
    if isinstance(edit, Add):
        return value + (mx.array(edit.vector) * edit.factor).astype(value.dtype)
    if edit.branch != "head":
        return value * edit.factor
    factors = mx.where(mx.arange(args.n_heads) == edit.head, edit.factor, 1.0).astype(value.dtype)
    # value is z, (..., n_heads * head_dim): multiply the slice of each head by its factor
    return (value.reshape(*value.shape[:-1], args.n_heads, -1) * factors[:, None]).reshape(value.shape)


def _check(edit: Edit, args: ModelArgs) -> None:
    if not 0 <= edit.layer < args.n_layers:
        raise UserError(f"layer {edit.layer}: this model has layers 0 to {args.n_layers - 1}")
    if not np.isfinite(edit.factor):
        raise UserError(f"layer {edit.layer}: the factor is {edit.factor}; it must be a finite number")
    if isinstance(edit, Add):
        if tuple(edit.vector.shape) != (args.dim,):
            raise UserError(
                f"layer {edit.layer}: the vector has shape {tuple(edit.vector.shape)}, expected ({args.dim},)"
            )
    elif edit.branch not in BRANCHES:
        raise UserError(f"layer {edit.layer}: branch {edit.branch!r} is none of {', '.join(BRANCHES)}")
    elif edit.branch == "head" and (edit.head is None or not 0 <= edit.head < args.n_heads):
        raise UserError(f"layer {edit.layer}: head {edit.head}: this model has heads 0 to {args.n_heads - 1}")
