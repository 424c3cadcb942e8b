"""MLX's own kernels, from the headers of the installed wheel, as the harness takes kernels."""

import re
from collections.abc import Mapping
from functools import cache

from tests.metal_harness.build import MLX_HEADERS
from tests.metal_harness.source import Kernel, parse_parameters, signature, split_arguments

FOLDER = MLX_HEADERS / "mlx/backend/metal/kernels"


def mlx_kernel(header: str, name: str, template: Mapping[str, str | int], **constants: str | int) -> Kernel:
    """Kernel `name` of `header`, a file in MLX's folder of kernels.

    Args:
        template: value of each template parameter, as Metal text.
        constants: value of each function constant of the header; false or 0 where not named.
    """
    items = [f'#include "mlx/backend/metal/kernels/{each}"\n' for each in _INCLUDED_BEFORE.get(header, ())]
    items += [item for item in _top_level((FOLDER / header).read_text()) if _is_needed(item, name)]
    source = _with_constants("".join(items), constants)
    head = source[slice(*signature(source, name)[:2])]
    declarations = split_arguments(head[head.index("<") + 1 : head.rindex(">")])
    names = [declaration.split("=")[0].split()[-1] for declaration in declarations]
    values = tuple((declaration, str(template[key])) for declaration, key in zip(declarations, names, strict=True))
    return Kernel(name, source, parse_parameters(source, name), values)


# Headers that MLX includes first where it builds the kernels of a header.
_INCLUDED_BEFORE = {"quantized.h": ("steel/utils.h",)}


def _is_needed(item: str, name: str) -> bool:
    """Not other kernels, which are templates that only Metal takes, and not what is built on matrix units."""
    if "[[kernel]]" in item and not re.search(rf"void\s+{name}\s*\(", item):
        return False
    return "mlx::steel" not in item and "simdgroup_matrix" not in item


def _with_constants(source: str, constants: Mapping[str, str | int]) -> str:
    """Function constants are set when Metal makes a pipeline; here, in the text."""

    def value(match: re.Match) -> str:
        return f"constant {match[1]} {match[2]} = {str(constants.get(match[2], 0)).lower()};"

    return re.sub(r"constant (\w+) (\w+) \[\[function_constant\(\d+\)\]\];", value, source)


@cache
def _top_level(text: str) -> tuple[str, ...]:
    """`text` cut behind each declaration, definition and preprocessor line; the parts together are `text`."""
    items, start, depth = [], 0, 0
    token = re.compile(r"//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*\n|\{|\}\s*;?|;", re.DOTALL | re.MULTILINE)
    for match in token.finditer(text):
        if match[0][0] == "/":
            continue
        depth += (match[0][0] == "{") - (match[0][0] == "}")
        if depth == 0:
            items.append(text[start : match.end()])
            start = match.end()
    return (*items, text[start:])
