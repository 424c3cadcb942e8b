"""Helpers of the fused kernels: Metal's type names, and the constants at the head of a kernel's source.

A kernel is built once for each set of constants. MLX's `template` argument would do the same, but MLX makes its text
again on every call. The cached builders take `mx.fast.metal_kernel` as their first argument, looked up on each call: a
kernel built with the emulator of the tests is never used with the real function.
"""

import mlx.core as mx

TYPES = {mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.float32: "float"}


def with_constants(body: str, dtype: mx.Dtype, **constants: int | float | str) -> str:
    """Prefix `body` with `using T = ...` and the constants: an int becomes a `constexpr uint`, a float a
    `constexpr float`, a string is a whole declaration after `constexpr`."""
    lines = [f"using T = {TYPES[dtype]};"]
    for name, value in constants.items():
        number = f"float {name} = {value:.9e}f" if isinstance(value, float) else f"uint {name} = {value}"
        lines.append(f"constexpr {value if isinstance(value, str) else number};")
    return "\n".join(lines) + "\n" + body


def unique_name(kernel: str, dtype: mx.Dtype, *constants: int | float | str) -> str:
    """A different name for each set of constants, because MLX caches compiled kernels by name."""
    return "_".join([f"llama3_{kernel}", TYPES[dtype], *map(_identifier, constants)])


def _identifier(constant: int | float | str) -> str:
    """The exact value, in characters that a name may have."""
    return constant.hex().translate(str.maketrans(".+-", "pxm")) if isinstance(constant, float) else str(constant)
