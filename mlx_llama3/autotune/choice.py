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
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_llama3.autotune.decisions import ByRows, Decision, DecisionFile, State, TrialsBusy
from mlx_llama3.autotune.trial import Case, Device, Timing, try_by_rows
from mlx_llama3.errors import UserError
from mlx_llama3.model.kernels.kernel_set import FUSED, NAMES, REFERENCE, Kernels, Rows
from mlx_llama3.system.hub import cache_dir

import mlx.core as mx

if TYPE_CHECKING:
    from mlx_llama3.model.transformer import Transformer

log = logging.getLogger(__name__)

VARIABLE = "MLX_LLAMA3_KERNELS"
MODES = ("auto", "reference", "fused")


@dataclass(frozen=True)
class KernelChoice:
    """The kernels to use, and the decisions on each kernel by its name."""

    kernels: Kernels
    decisions: Mapping[str, ByRows]

    @classmethod
    def of(cls, decisions: Mapping[str, ByRows]) -> "KernelChoice":
        """The kernels at the rows where the decision is "used"."""
        return cls(Kernels(**{name: used_rows(by_rows) for name, by_rows in decisions.items()}), decisions)

    @classmethod
    def all_alike(cls, kernels: Kernels, reason: str) -> "KernelChoice":
        """All kernels, or none, for the same reason."""
        state = "used" if kernels == FUSED else "absent"
        return cls(kernels, {name: {Rows.ALL: Decision(state, reason)} for name in NAMES})


def used_rows(by_rows: ByRows) -> Rows:
    """The numbers of rows at which the decision is "used"."""
    return reduce(or_, (rows for rows, decision in by_rows.items() if decision.state == "used"), Rows.NONE)


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

    On a Mac the trials of the first model of each shape take a second or two; the decisions are stored
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

    whole_step: makes the case of all used kernels together, for one row. If it is slower, none of them is used at one
        row; if it is wrong, at none.
    """
    stored = file.read()

    def decide(kernel: str, trials: Sequence[Case]) -> ByRows:
        if not trials:
            return _for_all_rows("absent", "it does not take the shapes or types of this model")
        key = "|".join([machine, *(case.key for case in trials)])
        name = f"kernel {kernel}" if kernel in NAMES else kernel
        if key in stored and stored[key] != _unfinished(file):
            return stored[key]
        try:
            with file.trying():
                if (decision := file.read().get(key)) is not None:  # stored by another process meanwhile
                    if decision == _unfinished(file):  # logged at every start: the crash may have had another cause
                        _log(name, decision)
                    return decision
                with _marked_unfinished(file, key):
                    decision = try_by_rows(trials, device or Device(), timing or Timing())
                    file.add({key: decision})
        except TrialsBusy as busy:
            return _for_all_rows("absent", str(busy))
        _log(name, decision)
        return decision

    decisions: dict[str, ByRows] = {}
    for kernel, trials in cases.items():
        used = KernelChoice.of(decisions).kernels
        decisions[kernel] = decide(kernel, [case for case in trials if _counts(case, used)])
    # The whole step has no quantized cache and no long context.
    kernels = replace(KernelChoice.of(decisions).kernels, sdpa_quantized=Rows.NONE, double_buffer=Rows.NONE)
    together = [kernel for kernel in decisions if Rows.ONE in getattr(kernels, kernel)]
    if whole_step is not None and together:
        (step,) = decide("all kernels together", [whole_step(kernels)]).values()
        if step.state != "used":
            decisions |= {kernel: _rejected(decisions[kernel], step) for kernel in together}
    return KernelChoice.of(decisions)


def _counts(case: Case, used: Kernels) -> bool:
    """Whether the kernels that the case's reference runs are used at its rows."""
    return all(case.rows in getattr(used, kernel) for kernel in case.beside)


@contextmanager
def _marked_unfinished(file: DecisionFile, key: str) -> Iterator[None]:
    """Store an unfinished decision during a trial, so that the next start does not try a kernel that crashed.

    Since MLX 0.32 a fault on the GPU is a `RuntimeError` of the next wait for it, which fails the trial; before, it
    ended the process. What still ends it: the compiler in the driver, the system where memory is short, and a person
    whose machine stands still.
    """
    file.add({key: _unfinished(file)})
    try:
        yield
    except BaseException:  # Ctrl-C says nothing about a kernel
        file.remove(key)
        raise


def _unfinished(file: DecisionFile) -> ByRows:
    """The decision that is in the file while a trial runs."""
    return _for_all_rows("failed", f"the program ended while it was tried; to try again, delete {file.path}")


def _for_all_rows(state: State, reason: str) -> ByRows:
    return {Rows.ALL: Decision(state, reason)}


def _rejected(by_rows: ByRows, step: Decision) -> ByRows:
    """The decisions on one kernel after the trial of the whole step failed."""
    alone = next(decision for rows, decision in by_rows.items() if Rows.ONE in rows)
    together = Decision(step.state, f"all together: {step.reason}; alone: {alone.reason}", alone.ratio)
    return {Rows.ALL: together} if step.state == "failed" else {**by_rows, Rows.ONE: together}


def _log(name: str, by_rows: ByRows) -> None:
    """Log each decision in one line: a used kernel as information, any other as a warning."""
    for decision in by_rows.values():
        level = logging.INFO if decision.state == "used" else logging.WARNING
        log.log(level, "%s: %s (%s)", name, decision.state, decision.reason)


@cache
def sources_hash() -> str:
    """A hash of the sources of kernels, caches and trials, so that what has changed is tried again."""
    digest = hashlib.sha256()
    autotune = Path(__file__).parent
    model = autotune.parent / "model"
    for file in sorted(path for room in (autotune, model / "kernels", model / "cache") for path in room.glob("*.*")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
