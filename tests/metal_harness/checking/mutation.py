"""Takes the barriers out of a kernel, one at a time: the checks must notice, unless the barrier was not needed."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.metal_harness.checking.checks import Checked, check
from tests.metal_harness.emulator import Dispatch
from tests.metal_harness.source import Kernel

_BARRIER = re.compile(r"\b(?:threadgroup|simdgroup)_barrier\s*\(")


@dataclass(frozen=True)
class Mutant:
    """A kernel without its barrier at `line`, and what the checks say about it."""

    line: int
    findings: tuple[str, ...]


def mutants(kernel: Kernel, check: Callable[[Kernel], Checked]) -> list[Mutant]:
    """One for each barrier in the kernel's text, in order; `check` runs a kernel."""
    source, found = kernel.source, []
    for start, end in barriers(source):
        mutated = replace(kernel, source=_without(source, start, end))
        found.append(Mutant(source.count("\n", 0, start) + 1, check(mutated).findings))
    return found


def unneeded_barriers(dispatches: Sequence[Dispatch]) -> list[int]:
    """Lines of barriers that can be taken out of a kernel without a finding in any of the `dispatches` of it.

    Give it shapes with all edges: a barrier at the end of a loop is needed only if the loop goes round.
    """
    rows = [mutants(each.kernel, lambda kernel, each=each: check(replace(each, kernel=kernel))) for each in dispatches]
    return [same[0].line for same in zip(*rows, strict=True) if not any(mutant.findings for mutant in same)]


def barriers(source: str) -> list[tuple[int, int]]:
    """Start and end of every call of a barrier in Metal source, outside of comments."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", lambda comment: " " * len(comment[0]), source, flags=re.S)
    found = []
    for match in _BARRIER.finditer(code):
        end, depth = match.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        found.append((match.start(), end))
    return found


def _without(source: str, start: int, end: int) -> str:
    """A statement stays a statement, and lines stay where they are."""
    return source[:start] + "(void)0" + "\n" * source.count("\n", start, end) + source[end:]
