"""Rules over the words of a kernel's source: the second half of `strict.py`, which reads its syntax tree."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.metal_harness.source import Kernel, signature

import mlx.core

KERNELS = Path(mlx.core.__file__).parent / "include/mlx/backend/metal/kernels"
_OF_INPUTS = ("_shape", "_strides", "_ndim")


@dataclass(frozen=True, order=True)
class Finding:
    """One thing to change, at a line of the MSL."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


def signature_words(kernel: Kernel) -> Iterator[Finding]:
    """Words that MLX takes for a parameter though the body does not use them as one.

    MLX looks for `x_shape`, `thread_position_in_grid` and the like as parts of the body's text, comments included, and
    gives the kernel a parameter for each that it finds.
    """
    end = signature(kernel.source, kernel.name)[2]
    text, code = kernel.source, without_comments(kernel.source)
    parameters = {parameter.name for parameter in kernel.parameters}
    for word in _found_by_mlx(kernel):
        for match in re.finditer(rf"\w*?{word}\w*", text[end:]):
            line = text.count("\n", 0, end + match.start()) + 1
            if code[end + match.start()] == " ":
                yield Finding(line, f"{word} in a comment: MLX makes a parameter of it")
            elif match[0] not in parameters:
                yield Finding(line, f"{match[0]} contains {word}: MLX makes a parameter of that")


def _found_by_mlx(kernel: Kernel) -> Iterator[str]:
    """The parameters that MLX made because the body's text holds their names."""
    parameters = {parameter.name for parameter in kernel.parameters}
    for parameter in kernel.parameters:
        of_input = any(parameter.name.removesuffix(end) in parameters - {parameter.name} for end in _OF_INPUTS)
        if of_input or parameter.name == parameter.attribute:
            yield parameter.name


def bfloat_without_need(kernel: Kernel) -> Iterator[Finding]:
    """The word bfloat in a kernel none of whose types is one.

    There is no bfloat before Metal 3.1 (macOS 14): there, a kernel of other types must compile too.
    """
    types = [parameter.type for parameter in kernel.parameters] + [value for _, value in kernel.template]
    if any("bfloat" in written for written in types):
        return
    for number, line in enumerate(without_comments(kernel.source).splitlines(), 1):
        if word := re.search(r"\w*bfloat\w*", line):
            yield Finding(number, f"{word[0]} in a kernel without an input or output of this type")


@cache
def mlx_names() -> frozenset[str]:
    """All names that occur in the Metal sources of the installed MLX."""
    text = "\n".join(without_comments(path.read_text()) for path in KERNELS.rglob("*.h"))
    return frozenset(names(text))


def names(code: str) -> Iterator[str]:
    """Identifiers, without members (`.xyz`) and suffixes of numbers."""
    code = re.sub(r'"(\\.|[^"\\\n])*"', '""', code)
    yield from re.findall(r"(?<![\w.])(?<!->)[A-Za-z_]\w*", code)


def without_comments(code: str) -> str:
    """The code with spaces for comments, so that each character keeps its place."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda match: re.sub(r"[^\n]", " ", match[0]), code, flags=re.S)
