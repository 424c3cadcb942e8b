"""Keeps an adapter's updates: a matrix whose packing would round its update away gets more bits."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tqdm import tqdm

from convert.conversion.plan import Plan, PlanStep
from convert.lora.loss import MOST_LOST, lost_share
from mlx_llama3.checkpoint.quantization import Quantization

T = TypeVar("T")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class HeldUpdate:
    """How the tensor `name` with an adapter fused is written (`packing`), and the share of its update lost so.

    `planned` is the packing that was planned, `planned_loss` what would be lost with it.
    """

    name: str
    packing: str
    loss: float
    planned: str
    planned_loss: float


def hold_updates(plan: Plan, *, progress: bool = False) -> tuple[Plan, list[HeldUpdate]]:
    """The plan with enough bits for every update, and what was measured; all fused tensors are read for that.

    Where more than `MOST_LOST` of an update would be lost, the matrix gets 8 bits; where these lose as much, it stays
    dense. Where nothing holds the update, what loses least is taken.
    """
    fused = [step for step in plan.steps if step.tensor.base]
    bar = tqdm(fused, desc="measure the adapter", unit="tensor", disable=None if progress else True, leave=False)
    steps, held = {}, []
    for planned in bar:
        choices = ((step.packing, step) for step in _roomier(planned))
        steps[planned.tensor.name], update = hold(planned.tensor.name, choices, update_loss)
        held.append(update)
    return replace(plan, steps=[steps.get(step.tensor.name, step) for step in plan.steps]), held


def update_loss(step: PlanStep) -> float:
    """The share of the update of a fused tensor that is lost when it is written as the step says."""
    tensor = step.tensor
    return lost_share(tensor, lambda *rows: step.stored(tensor.rows(*rows)), step.stored_base, step.block_rows)


def hold(name: str, choices: Iterable[tuple[str, T]], loss: Callable[[T], float]) -> tuple[T, HeldUpdate]:
    """The first of `choices` that loses no more than `MOST_LOST` of an update, else the one that loses least.

    Args:
        name: the tensor.
        choices: packings in words, each with what `loss` takes; first the planned one.
        loss: measures the share that is lost.
    """
    tried: list[tuple[str, T, float]] = []
    for packing, choice in choices:
        tried.append((packing, choice, loss(choice)))
        if tried[-1][2] <= MOST_LOST:
            break
    else:
        tried.append(min(tried, key=lambda each: each[2]))
    packing, choice, share = tried[-1]
    return choice, HeldUpdate(name, packing, share, planned=tried[0][0], planned_loss=tried[0][2])


def _roomier(step: PlanStep) -> Iterator[PlanStep]:
    """The step itself, then with 8 bits, then dense."""
    yield step
    quantization = step.quantization
    if quantization is None:
        return
    eight = Quantization(8, quantization.group_size if quantization.mode == "affine" else 32)
    if quantization != eight and step.tensor.shape[1] % eight.group_size == 0:
        yield replace(step, quantization=eight, as_is=False)
    yield replace(step, quantization=None, as_is=False)


def loss_notes(held: Sequence[HeldUpdate], remedy: str = "--dtype float32 holds it") -> list[str]:
    """What the report says: which matrices got more bits, what still is lost, and the largest loss of the others.

    remedy: what to do where nothing holds an update.
    """
    notes = []
    for (planned, packing), updates in _grouped(update for update in held if update.packing != update.planned).items():
        still = max(update.loss for update in updates)
        notes.append(
            f"{packing} instead of {planned} for {_names(updates)}: {planned} would lose "
            f"{_percent(update.planned_loss for update in updates)} of what the adapter changes there; {packing} loses "
            f"{100 * still:.1f} % at most"
        )
    for (_, packing), updates in _grouped(update for update in held if update.loss > MOST_LOST).items():
        lost = _percent(update.loss for update in updates)
        notes.append(f"{packing} loses {lost} of what the adapter changes in {_names(updates)}; {remedy}")
    if held and not notes:
        worst = max(held, key=lambda update: update.loss)
        share = f"{100 * worst.loss:.1f} %"
        notes.append(f"at most {share} of an update of the adapter is lost by rounding ({worst.name})")
    return notes


def _grouped(held: Iterable[HeldUpdate]) -> dict[tuple[str, str], list[HeldUpdate]]:
    """Updates by the packing that was planned and the one that was taken."""
    groups: dict[tuple[str, str], list[HeldUpdate]] = {}
    for update in held:
        groups.setdefault((update.planned, update.packing), []).append(update)
    return groups


def _percent(shares: Iterable[float]) -> str:
    """'93 %', or '88 to 93 %'."""
    values = sorted({round(100 * share) for share in shares})
    return f"{values[0]} %" if len(values) == 1 else f"{values[0]} to {values[-1]} %"


def _names(updates: Sequence[HeldUpdate]) -> str:
    """'mlp.down_proj of layers 0-2, 5; lm_head'."""
    layers: dict[str, list[int]] = {}
    for update in updates:
        name = update.name.removesuffix(".weight")
        match = _LAYER.fullmatch(name)
        layers.setdefault(match[2] if match else name, []).extend([int(match[1])] if match else [])
    return "; ".join(
        f"{name} of layer{'s' if numbers[1:] else ''} {_ranges(numbers)}" if numbers else name
        for name, numbers in layers.items()
    )


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)
