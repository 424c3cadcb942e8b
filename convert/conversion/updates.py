"""Keeps an adapter's updates: a matrix whose packing would round its update away gets more bits."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from convert.conversion.plan import Plan, PlanStep
from convert.lora.loss import MOST_LOST, lost_share
from mlx_llama3.checkpoint.quantization import Quantization

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class HeldUpdate:
    """How one tensor with an adapter fused is written, and the share of its update that is lost so.

    `planned` is the step that was planned, `planned_loss` what would be lost with it.
    """

    step: PlanStep
    loss: float
    planned: PlanStep
    planned_loss: float


def hold_updates(plan: Plan, *, progress: bool = False) -> tuple[Plan, list[HeldUpdate]]:
    """The plan with enough bits for every update, and what was measured; all fused tensors are read for that.

    Where more than `MOST_LOST` of an update would be lost, the matrix gets 8 bits; where these lose as much, it stays
    dense. Where nothing holds the update, what loses least is taken.
    """
    fused = [step for step in plan.steps if step.tensor.base]
    bar = tqdm(fused, desc="measure the adapter", unit="tensor", disable=None if progress else True, leave=False)
    held = [_hold(step) for step in bar]
    steps = {update.planned.tensor.name: update.step for update in held}
    return replace(plan, steps=[steps.get(step.tensor.name, step) for step in plan.steps]), held


def update_loss(step: PlanStep) -> float:
    """The share of the update of a fused tensor that is lost when it is written as the step says."""
    tensor = step.tensor
    return lost_share(tensor, lambda *rows: step.stored(tensor.rows(*rows)), step.stored_base, step.block_rows)


def _hold(planned: PlanStep) -> HeldUpdate:
    losses: list[tuple[PlanStep, float]] = []
    for step in _roomier(planned):
        losses.append((step, update_loss(step)))
        # A loss that is not a number comes from a value that is none, which the conversion refuses.
        if not losses[-1][1] > MOST_LOST:
            break
    else:
        losses.append(min(losses, key=lambda candidate: candidate[1]))
    return HeldUpdate(*losses[-1], *losses[0])


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


def loss_notes(held: Sequence[HeldUpdate]) -> list[str]:
    """What the report says: which matrices got more bits, what still is lost, and the largest loss of the others."""
    notes = []
    moved: dict[tuple[str, str], list[HeldUpdate]] = {}
    for update in held:
        if update.step != update.planned:
            moved.setdefault((update.planned.packing, update.step.packing), []).append(update)
    for (planned, packing), updates in moved.items():
        lost = _percent(update.planned_loss for update in updates)
        still = max(update.loss for update in updates)
        notes.append(
            f"{packing} instead of {planned} for {_names(updates)}: {planned} would lose {lost} of what the adapter "
            f"changes there; {packing} loses {100 * max(0.0, still):.1f} % at most"
        )
    for dtype, updates in _by_dtype(held).items():
        lost = _percent(update.loss for update in updates)
        notes.append(f"{dtype} loses {lost} of what the adapter changes in {_names(updates)}; --dtype float32 holds it")
    if held and not notes:
        worst = max(held, key=lambda update: update.loss)
        share = f"{100 * max(0.0, worst.loss):.1f} %"
        notes.append(f"at most {share} of an update of the adapter is lost by rounding ({worst.step.tensor.name})")
    return notes


def _by_dtype(held: Sequence[HeldUpdate]) -> Mapping[str, list[HeldUpdate]]:
    """The updates that nothing holds, by the packing that loses least."""
    lost: dict[str, list[HeldUpdate]] = {}
    for update in held:
        if update.loss > MOST_LOST:
            lost.setdefault(update.step.packing, []).append(update)
    return lost


def _percent(shares: Iterator[float]) -> str:
    """'93 %', or '88 to 93 %'."""
    values = sorted({round(100 * share) for share in shares})
    return f"{values[0]} %" if len(values) == 1 else f"{values[0]} to {values[-1]} %"


def _names(updates: Sequence[HeldUpdate]) -> str:
    """'mlp.down_proj of layers 0-2, 5; lm_head'."""
    layers: dict[str, list[int]] = {}
    for update in updates:
        name = update.step.tensor.name.removesuffix(".weight")
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
