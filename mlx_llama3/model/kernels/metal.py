"""Helpers of the fused kernels: Metal's type names, and the constants at the head of a kernel's source.

A kernel is built once for each set of constants. MLX's `template` argument would do the same, but MLX makes its text
again on every call. The cached builders take `mx.fast.metal_kernel` as their first argument, looked up on each call: a
kernel built with the emulator of the tests is never used with the real function.
"""

import mlx.core as mx

TYPES = {mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.float32: "float"}


def with_constants(body: str, dtype: mx.Dtype, **constants: int | str) -> str:
    """Prefix `body` with `using T = ...` and the constants: an int becomes a `constexpr uint`, a string is a whole
    declaration after `constexpr`."""
    lines = [f"using T = {TYPES[dtype]};"]
    for name, value in constants.items():
        lines.append(f"constexpr uint {name} = {value};" if isinstance(value, int) else f"constexpr {value};")
    return "\n".join(lines) + "\n" + body


def unique_name(kernel: str, dtype: mx.Dtype, *constants: int | str) -> str:
    """A different name for each set of constants, because MLX caches compiled kernels by name."""
    return "_".join([f"llama3_{kernel}", TYPES[dtype], *(str(constant) for constant in constants)])
