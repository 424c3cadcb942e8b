"""Which kernels serve a loaded model: those that a trial on this machine found right and faster than their reference.

`MLX_LLAMA3_KERNELS` says how to choose: "auto" (the default) tries them where there is Metal, "reference" and "fused"
take the one or the other without a trial.
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
WAYS = ("auto", "reference", "fused")
NAMES = tuple(field.name for field in fields(Kernels))


@dataclass(frozen=True)
class KernelChoice:
    """The kernels that serve, and of each what was found."""

    kernels: Kernels
    decisions: Mapping[str, Decision]

    @classmethod
    def of(cls, decisions: Mapping[str, Decision]) -> "KernelChoice":
        """Those that a trial found worth using."""
        return cls(Kernels(**{name: each.state == "used" for name, each in decisions.items()}), decisions)

    @classmethod
    def all_alike(cls, kernels: Kernels, reason: str) -> "KernelChoice":
        """All kernels, or none, for the same reason."""
        state = "used" if kernels == FUSED else "absent"
        return cls(kernels, {name: Decision(state, reason) for name in NAMES})


def has_metal() -> bool:
    """Whether this process computes on a GPU with Metal."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu


def requested_kernels() -> str:
    """What `MLX_LLAMA3_KERNELS` says.

    Raises `UserError` for a word that it does not know, and for "fused" where there is no Metal.
    """
    way = os.environ.get(VARIABLE, "").strip() or WAYS[0]
    if way not in WAYS:
        raise UserError(f"{VARIABLE} is {way!r:.40}; it must be one of {', '.join(WAYS)}")
    if way == "fused" and not has_metal():
        raise UserError(f"{VARIABLE} is fused, but the kernels need Metal, which is not here; say auto or reference")
    return way


def use_chosen(model: "Transformer") -> KernelChoice:
    """Choose the kernels of a model and have them serve it.

    On a Mac the first model of each shape takes about a second for it; what was found is kept (`decisions.py`).
    Raises `UserError` as `requested_kernels`.
    """
    way = requested_kernels()
    if way == "reference":
        choice = KernelChoice.all_alike(REFERENCE, f"{VARIABLE} is reference")
    elif way == "fused":
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
    choice = choose(model_cases(model), file, machine(), together=partial(step_case, model))
    mx.clear_cache()  # of what the trials used
    return choice


def machine() -> str:
    """What a decision holds for besides shapes: chip, system (whose compiler it is), MLX, and the kernels' source."""
    chip = mx.device_info()["device_name"]
    return f"{chip}|{platform.system()} {platform.mac_ver()[0]}|MLX {mx.__version__}|{sources_hash()}"


def choose(
    cases: Mapping[str, Sequence[Case]],
    file: DecisionFile,
    machine: str,
    *,
    together: Callable[[Kernels], Case] | None = None,
    device: Device | None = None,
    timing: Timing | None = None,
) -> KernelChoice:
    """A decision on each kernel: the one that is kept, or else what a trial of its cases finds, which is then kept.

    together: makes the case of all that serve. If that one is wrong or slower, none of them does.
    """
    kept = file.read()

    def decide(kernel: str, uses: Sequence[Case]) -> Decision:
        if not uses:
            return Decision("absent", "it does not take the shapes or types of this model")
        key, name = "|".join([machine, *(case.key for case in uses)]), f"kernel {kernel}" if kernel in NAMES else kernel
        if key in kept and kept[key] != _unfinished(file):
            return kept[key]
        with file.trying():
            if (found := file.read().get(key)) is not None:  # by another process meanwhile
                if found == _unfinished(file):  # said at every start: the end may have had another cause
                    _tell(name, found)
                return found
            with _surviving(file, key):
                decision = try_kernel(uses, device or Device(), timing or Timing())
                file.add({key: decision})
        _tell(name, decision)
        return decision

    decisions = {kernel: decide(kernel, uses) for kernel, uses in cases.items()}
    # A quantized cache is no part of the plain step.
    kernels = replace(KernelChoice.of(decisions).kernels, sdpa_quantized=False)
    if together is not None and kernels != REFERENCE:
        whole = decide("all kernels together", [together(kernels)])
        if whole.state != "used":
            decisions |= {kernel: _spoilt(decisions[kernel], whole) for kernel in decisions if getattr(kernels, kernel)}
    return KernelChoice.of(decisions)


@contextmanager
def _surviving(file: DecisionFile, key: str) -> Iterator[None]:
    """Around a trial. A kernel that faults on the GPU ends the process, as MLX handles it; the next start finds here
    that this one failed, and leaves it alone."""
    file.add({key: _unfinished(file)})
    try:
        yield
    except BaseException:  # Ctrl-C says nothing of a kernel
        file.remove(key)
        raise


def _unfinished(file: DecisionFile) -> Decision:
    """What stands for a trial in the file until it has ended."""
    return Decision("failed", f"the program ended while it was tried; to try again, delete {file.path}")


def _spoilt(decision: Decision, whole: Decision) -> Decision:
    """What is left of a decision for a kernel, where all together are none to use."""
    return Decision(whole.state, f"all together: {whole.reason}; alone: {decision.reason}", decision.ratio)


def _tell(what: str, decision: Decision) -> None:
    """One line, once; a kernel that serves is no news."""
    level = logging.INFO if decision.state == "used" else logging.WARNING
    log.log(level, "%s: %s (%s)", what, decision.state, decision.reason)


@cache
def sources_hash() -> str:
    """Of the kernels and of their trial, so that a kernel which was changed is tried again."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for file in sorted([*here.glob("*.*"), *(here.parent / "model" / "kernels").glob("*.*")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
