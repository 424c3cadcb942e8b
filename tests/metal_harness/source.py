"""The Metal source that MLX generates for one call of a custom kernel."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel: a buffer, whose `space` is "device" or "constant", or an attribute of the thread."""

    name: str
    type: str  # of the element: "float", "uint32_t"; of the attribute: "uint3"
    space: str  # "" for an attribute
    const: bool
    reference: bool  # one value, not an array
    attribute: str  # what stands in [[...]]: "buffer(3)", "thread_position_in_grid"


@dataclass(frozen=True)
class Kernel:
    """A kernel as MLX hands it to Metal.

    `source` is the exact text, without the headers that MLX puts before every kernel. `template` has the declaration
    and the value of each template parameter: ("typename T", "bfloat16_t"), ("int N", "5"). `row_contiguous`: inputs are
    copied where they are not. `init_value`: what outputs hold before.
    """

    name: str
    source: str
    parameters: tuple[Parameter, ...]
    template: tuple[tuple[str, str], ...] = ()
    row_contiguous: bool = True
    init_value: float | None = None

    @property
    def buffers(self) -> tuple[Parameter, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.space)


def generated(kernel: Callable, **call) -> Kernel:
    """What MLX generates for `kernel(**call)`; `kernel` comes from `mx.fast.metal_kernel`, and nothing is run.

    MLX builds the text when the call is traced, with or without Metal. The text depends on the template arguments, and
    on dtype and size of each input: under 8 elements it is `constant`, without axes a reference. The arguments of the
    traced operation are, in MLX 0.32: name, source, grid (3), threadgroup (3), facts about the inputs, row_contiguous.

    Raises:
        ValueError: MLX refuses the call (its message), or the call made other than one kernel.
    """
    primitives = []

    def trace(*inputs: mx.array) -> list[mx.array]:
        return kernel(**{**call, "inputs": list(inputs)})

    def collect(entry: dict) -> None:
        if entry["type"] == "primitive" and entry["name"] == "CustomKernel":
            primitives.append(entry["arguments"])

    mx.export_function(collect, trace, *call["inputs"])
    if len(primitives) != 1:
        raise ValueError(f"expected a call of one metal kernel, it made {len(primitives)}")
    name, source, row_contiguous = primitives[0][0], primitives[0][1], primitives[0][9]
    parameters = parse_parameters(source, name)
    return Kernel(name, source, parameters, _template(source, name), row_contiguous, call.get("init_value"))


def signature(source: str, name: str) -> tuple[int, int, int]:
    """Where the kernel function starts (at its template line if it has one), where its parameters start and end."""
    match = re.search(r"(?:template\s*<[^{};]*?>\s*)?\[\[kernel\]\]\s*void\s+" + re.escape(name) + r"\s*\(", source)
    if match is None:
        raise ValueError(f"no kernel {name} in the source")
    depth, end = 1, match.end()
    while depth:
        depth += {"(": 1, ")": -1}.get(source[end], 0)
        end += 1
    return match.start(), match.end(), end - 1


def parse_parameters(source: str, name: str) -> tuple[Parameter, ...]:
    """The parameters of kernel `name`, in order."""
    _, start, end = signature(source, name)
    return tuple(_parameter(text) for text in split_arguments(source[start:end]))


def split_arguments(text: str) -> list[str]:
    """`text` cut at its commas, except those in brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([<{") - (character in ")]>}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [" ".join(part.split()) for part in parts if part.strip()]


def _parameter(text: str) -> Parameter:
    match = re.fullmatch(r"(.*?)([*&]?) ?(\w+)(?: ?\[\[(.*)\]\])?", text)
    if match is None:
        raise ValueError(f"cannot read the kernel parameter {text!r}")
    words = match[1].split()
    space = next((word for word in words if word in ("device", "constant")), "")
    element = " ".join(word for word in words if word not in ("const", "device", "constant"))
    return Parameter(match[3], element, space, "const" in words, match[2] == "&", match[4] or "")


def _template(source: str, name: str) -> tuple[tuple[str, str], ...]:
    start, _, _ = signature(source, name)
    declaration = re.compile(r"template\s*<(.*?)>\s*\[\[kernel\]\]", re.DOTALL).match(source, start)
    if declaration is None:
        return ()
    instance = re.search(r"decltype\(" + re.escape(name) + r"<(.*?)>\)", source)
    return tuple(zip(split_arguments(declaration[1]), split_arguments(instance[1]), strict=True))
