"""What if: a model with branches scaled, heads silenced, or a vector added. The model itself is never changed.

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
    """Multiply the update of a branch by `factor` (0 silences it): "attention" or "mlp" of `layer`, or one "head"."""

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
    """A twin of `model` that shares its weights and runs under `edits`; use it wherever a model is used.

    Several edits of one place are applied in their order.

    Raises:
        UserError: no such layer, branch or head; a vector of another length; a factor that is no finite number.
    """
    places: dict[tuple[int, str], list[Edit]] = defaultdict(list)
    for edit in edits:
        _check(edit, model.args)
        name = _POINTS[edit.branch] if isinstance(edit, Scale) else "resid_post"
        places[edit.layer, name].append(edit)

    def apply(layer: int, name: str, value: mx.array) -> mx.array:
        for edit in places.get((layer, name), ()):
            value = _applied(edit, value, model.args)
        return value

    if not places:
        return copy.copy(model)
    model.need_whole()
    names = tuple({name for _, name in places})
    return tapped(model, apply, names=names, layers={layer for layer, _ in places})


def _applied(edit: Edit, value: mx.array, args: ModelArgs) -> mx.array:
    if isinstance(edit, Add):
        return value + (mx.array(edit.vector) * edit.factor).astype(value.dtype)
    if edit.branch != "head":
        return value * edit.factor
    factors = mx.where(mx.arange(args.n_heads) == edit.head, edit.factor, 1.0).astype(value.dtype)
    # (..., n_heads * head_dim): each head's slice times its factor
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
