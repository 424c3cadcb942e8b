"""What a fused adapter does in a folder, compared with what base plus adapter compute in float32.

The bound of a packing does not tell: an update smaller than a step can be missing, and each tensor is within its bound.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from convert.conversion.plan import PlanStep
from convert.lora.loss import MOST_LOST, difference, lost_share
from convert.sources.source import Source, SourceTensor

import mlx.core as mx


@dataclass(frozen=True)
class AdapterEffect:
    """The adapter's effect on the log probabilities of the next tokens, float32.

    `size` is the RMS of what the updates change in the folder's model when they are not rounded, in nats. `kept` is the
    share of it that the folder has: what it does less what it would do without the adapter, projected onto the effect.
    `uncertainty` is the standard error of `kept` over the positions. `off` is the RMS difference of the folder from
    base plus adapter, in nats; the packing of the base is part of it.
    """

    size: float
    kept: float
    uncertainty: float
    off: float

    @property
    def ok(self) -> bool:
        """Whether `kept` is 1 to within `MOST_LOST`, and three standard errors for noise."""
        return abs(1 - self.kept) <= MOST_LOST + 3 * self.uncertainty

    def __str__(self) -> str:
        return (
            f"the adapter changes log probabilities by {self.size:.3g} (RMS): the folder keeps {100 * self.kept:.1f} % "
            f"of that (+- {100 * self.uncertainty:.1f}), and differs from base plus adapter by {self.off:.3g}"
        )


def lost_updates(target: Source, source: Source) -> dict[str, float]:
    """The share of each update that is lost in the folder `target`, by tensor. `source` has the adapter fused."""
    return {
        step.tensor.name: lost_share(
            step.tensor, target.tensors[step.tensor.name].rows, step.stored_base, step.block_rows
        )
        for step in _steps(target, source)
    }


def variants(target: Source, source: Source) -> dict[str, Source]:
    """The folder `target` "plain", as it would be had the adapter of `source` not been fused, and "unrounded", with the
    updates added to that in float32. Empty if no adapter is fused into `source`.
    """
    plain, unrounded = dict(target.tensors), dict(target.tensors)
    steps = _steps(target, source)
    for step in steps:
        plain[step.tensor.name] = _computed(step.tensor, step.stored_base)
        unrounded[step.tensor.name] = _computed(step.tensor, partial(_unrounded, step))
    return {"plain": replace(target, tensors=plain), "unrounded": replace(target, tensors=unrounded)} if steps else {}


def _steps(target: Source, source: Source) -> list[PlanStep]:
    """How the folder stores each tensor that has an update."""
    return [
        PlanStep(tensor, target.tensors[name].dtype, target.tensors[name].quantization)
        for name, tensor in source.tensors.items()
        if tensor.base
    ]


def _computed(tensor: SourceTensor, rows: Callable[[int, int], mx.array]) -> SourceTensor:
    return replace(tensor, rows=rows, quantization=None, quantized_rows=None)


def _unrounded(step: PlanStep, start: int, stop: int) -> mx.array:
    update = difference(step.tensor.rows(start, stop), step.tensor.base.rows(start, stop))
    return step.stored_base(start, stop).astype(mx.float32) + update


def adapter_effect(outcomes: Mapping[str, mx.array]) -> AdapterEffect:
    """Measure the effect from log probabilities (S, vocab_size), float32.

    `outcomes` holds those of the "source" (base plus adapter), of the "folder", and of its `variants`.
    """
    effect, actual = outcomes["unrounded"] - outcomes["plain"], outcomes["folder"] - outcomes["plain"]
    along, size = (mx.sum(one * effect, axis=-1) for one in (actual, effect))  # (S,)
    total = mx.sum(size).item()
    kept = mx.sum(along).item() / total if total else 1.0
    scatter = mx.linalg.norm(along - kept * size).item()
    off = mx.mean(mx.square(outcomes["folder"] - outcomes["source"])).item()
    return AdapterEffect(
        size=math.sqrt(total / effect.size),
        kept=kept,
        uncertainty=scatter / total if total else 0.0,
        off=math.sqrt(off),
    )
