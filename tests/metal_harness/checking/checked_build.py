"""How a kernel is compiled for `checks.py`: with clang's sanitizers, and calls for what these do not look at."""

import re

from tests.metal_harness.build import Mode


def with_calls(code: str) -> str:
    """Unoptimized LLVM code, with calls before what clang has no check for in this language.

    Shifts: OpenCL masks the count, in an instruction that clang names. Vectors: clang checks the alignment of whole
    values only, not that of `p->x`. And AddressSanitizer leaves variables with a section alone; without one it guards
    threadgroup variables.
    """
    shift = r"^( +)(%sh[lr]\.mask\d* = and i(32|64) ([%\w.]+), \d+)(, !dbg !\d+)$"
    code = re.sub(shift, r"\1call void @checks_shift_\3(i\3 \4)\5\n\1\2\5", code, flags=re.M)
    return _check_vectors(code).replace(', section "threadgroup"', "") + _CALLED


def _check_vectors(code: str) -> str:
    variables = set(re.findall(r"^ +(%\S+) = alloca", code, flags=re.M))  # they are aligned

    def check(access: re.Match) -> str:
        indent, pointer, alignment, place = access.groups()
        if pointer in variables:
            return access[0]
        return f"{indent}call void @checks_alignment(ptr {pointer}, i32 {alignment}){place}\n{access[0]}"

    vector = r"^( +)(?:%\S+ = load|store) <[^>]*>.*, ptr (%[\w.]+), align (\d+).*?(, !dbg !\d+).*$"
    return re.sub(vector, check, code, flags=re.M)


_CALLED = """
declare void @checks_shift_32(i32)
declare void @checks_shift_64(i64)
declare void @checks_alignment(ptr, i32)
"""

_ADDRESS_OPTIONS = (
    "-asan-instrumentation-with-call-threshold=0",
    "-asan-stack=0",
    "-asan-opt=0",
    "-asan-opt-same-temp=0",
    "-asan-kernel-mem-intrinsic-prefix=1",
)
CHECKED = Mode(
    "checked",
    frontend=(
        *("-O1", "-gline-tables-only", "-gdwarf-4", "-fno-discard-value-names", "-ftrivial-auto-var-init=pattern"),
        "-DMETAL_FINITE_MATH",
        "-fsanitize=kernel-address,alignment,array-bounds,integer-divide-by-zero,float-cast-overflow,signed-integer-overflow",
        "-fsanitize-recover=all",
    ),
    optimizer=(
        *("-O1", "-fno-vectorize", "-fno-slp-vectorize", "-fsanitize=kernel-address"),
        *(flag for option in _ADDRESS_OPTIONS for flag in ("-mllvm", option)),
    ),
    rewrite=with_calls,
)
