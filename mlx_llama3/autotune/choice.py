"""Chooses the fused kernels of a loaded model: those that are correct and faster than their reference in a trial here.

`MLX_LLAMA3_KERNELS` sets the mode: "auto" (the default) tries the kernels where there is Metal; "reference" and "fused"
use the references or the kernels without a trial.
"""

import hashlib
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_llama3.autotune.decisions import Decision, DecisionFile
from mlx_llama3.autotune.trial import Case, Device, Timing, try_kernel
from mlx_llama3.errors import UserError
from mlx_llama3.model.kernels.kernel_set import FUSED, REFERENCE, Kernels
from mlx_llama3.system.hub import cache_dir

import mlx.core as mx

if TYPE_CHECKING:
    from mlx_llama3.model.transformer import Transformer

log = logging.getLogger(__name__)

VARIABLE = "MLX_LLAMA3_KERNELS"
MODES = ("auto", "reference", "fused")
NAMES = tuple(field.name for field in fields(Kernels))


@dataclass(frozen=True)
class KernelChoice:
    """The kernels to use, and the decision on each kernel by its name."""

    kernels: Kernels
    decisions: Mapping[str, Decision]

    @classmethod
    def of(cls, decisions: Mapping[str, Decision]) -> "KernelChoice":
        """The kernels whose decision is "used"."""
        return cls(Kernels(**{name: decision.state == "used" for name, decision in decisions.items()}), decisions)

    @classmethod
    def all_alike(cls, kernels: Kernels, reason: str) -> "KernelChoice":
        """All kernels, or none, for the same reason."""
        state = "used" if kernels == FUSED else "absent"
        return cls(kernels, {name: Decision(state, reason) for name in NAMES})


def has_metal() -> bool:
    """Whether this process computes on a GPU with Metal."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu


def requested_kernels() -> str:
    """The mode that `MLX_LLAMA3_KERNELS` sets: "auto", "reference" or "fused".

    Raises `UserError` for any other word, and for "fused" without Metal.
    """
    mode = os.environ.get(VARIABLE, "").strip() or MODES[0]
    if mode not in MODES:
        raise UserError(f"{VARIABLE} is {mode!r:.40}; it must be one of {', '.join(MODES)}")
    if mode == "fused" and not has_metal():
        raise UserError(f"{VARIABLE} is fused, but the kernels need Metal, which is not here; set auto or reference")
    return mode


def use_chosen(model: "Transformer") -> KernelChoice:
    """Choose the kernels of a model, and switch the model to them.

    On a Mac the trials of the first model of each shape take about a second; the decisions are stored
    (`decisions.py`). Raises `UserError` as `requested_kernels`.
    """
    mode = requested_kernels()
    if mode == "reference":
        choice = KernelChoice.all_alike(REFERENCE, f"{VARIABLE} is reference")
    elif mode == "fused":
        choice = KernelChoice.all_alike(FUSED, f"{VARIABLE} is fused: not tried")
    elif not has_metal():
        choice = KernelChoice.all_alike(REFERENCE, "there is no Metal here")
    else:
        choice = _tried(model)
    model.use(choice.kernels)
    return choice


def _tried(model: "Transformer") -> KernelChoice:
    from mlx_llama3.autotune.cases import model_cases  # here, because only a Mac needs them
    from mlx_llama3.autotune.whole_step import step_case

    file = DecisionFile(cache_dir() / "kernels.json")
    choice = choose(model_cases(model), file, machine(), whole_step=partial(step_case, model))
    mx.clear_cache()  # frees the buffers of the trials
    return choice


def machine() -> str:
    """What a decision depends on besides shapes: chip, system (with its compiler), MLX, and the kernels' source."""
    chip = mx.device_info()["device_name"]
    return f"{chip}|{platform.system()} {platform.mac_ver()[0]}|MLX {mx.__version__}|{sources_hash()}"


def choose(
    cases: Mapping[str, Sequence[Case]],
    file: DecisionFile,
    machine: str,
    *,
    whole_step: Callable[[Kernels], Case] | None = None,
    device: Device | None = None,
    timing: Timing | None = None,
) -> KernelChoice:
    """The decision on each kernel: the stored one, or else the result of a trial of its cases, which is then stored.

    whole_step: makes the case of all used kernels together. If that case is wrong or slower, none of them is used.
    """
    stored = file.read()

    def decide(kernel: str, trials: Sequence[Case]) -> Decision:
        if not trials:
            return Decision("absent", "it does not take the shapes or types of this model")
        key = "|".join([machine, *(case.key for case in trials)])
        name = f"kernel {kernel}" if kernel in NAMES else kernel
        if key in stored and stored[key] != _unfinished(file):
            return stored[key]
        with file.trying():
            if (decision := file.read().get(key)) is not None:  # stored by another process meanwhile
                if decision == _unfinished(file):  # logged at every start: the crash may have had another cause
                    _log(name, decision)
                return decision
            with _marked_unfinished(file, key):
                decision = try_kernel(trials, device or Device(), timing or Timing())
                file.add({key: decision})
        _log(name, decision)
        return decision

    decisions = {kernel: decide(kernel, trials) for kernel, trials in cases.items()}
    # The whole step has no quantized cache.
    kernels = replace(KernelChoice.of(decisions).kernels, sdpa_quantized=False)
    if whole_step is not None and kernels != REFERENCE:
        step = decide("all kernels together", [whole_step(kernels)])
        if step.state != "used":
            rejected = [kernel for kernel in decisions if getattr(kernels, kernel)]
            decisions |= {kernel: _rejected(decisions[kernel], step) for kernel in rejected}
    return KernelChoice.of(decisions)


@contextmanager
def _marked_unfinished(file: DecisionFile, key: str) -> Iterator[None]:
    """Store an unfinished decision during a trial, so that the next start does not try a kernel that crashed.

    MLX ends the process when a kernel faults on the GPU.
    """
    file.add({key: _unfinished(file)})
    try:
        yield
    except BaseException:  # Ctrl-C says nothing about a kernel
        file.remove(key)
        raise


def _unfinished(file: DecisionFile) -> Decision:
    """The decision that is in the file while a trial runs."""
    return Decision("failed", f"the program ended while it was tried; to try again, delete {file.path}")


def _rejected(decision: Decision, step: Decision) -> Decision:
    """The decision for one kernel after the trial of the whole step failed."""
    return Decision(step.state, f"all together: {step.reason}; alone: {decision.reason}", decision.ratio)


def _log(name: str, decision: Decision) -> None:
    """Log a decision in one line: a used kernel as information, any other as a warning."""
    level = logging.INFO if decision.state == "used" else logging.WARNING
    log.log(level, "%s: %s (%s)", name, decision.state, decision.reason)


@cache
def sources_hash() -> str:
    """A hash of the sources of the kernels and their trials, so that a changed kernel is tried again."""
    digest = hashlib.sha256()
    autotune = Path(__file__).parent
    for file in sorted([*autotune.glob("*.*"), *(autotune.parent / "model" / "kernels").glob("*.*")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
