"""What the fused kernels share: Metal's names of types, and the constants that a kernel's source is completed with.

A kernel is built for each set of constants, without MLX's `template` argument, whose text MLX would make again for
every call. `mx.fast.metal_kernel` is looked up at each use: the builders take it as their first argument, so that a
kernel built by one is never used for another.
"""

import mlx.core as mx

TYPES = {mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.float32: "float"}


def completed(body: str, dtype: mx.Dtype, **constants: int | str) -> str:
    """`body` after `using T = ...` and the constants: whole numbers as `constexpr uint`, strings as they are."""
    lines = [f"using T = {TYPES[dtype]};"]
    for name, value in constants.items():
        lines.append(f"constexpr uint {name} = {value};" if isinstance(value, int) else f"constexpr {value};")
    return "\n".join(lines) + "\n" + body


def title(kernel: str, dtype: mx.Dtype, *numbers: int | str) -> str:
    """A name of its own for each set of constants: MLX keeps compiled kernels by name."""
    return "_".join([f"llama3_{kernel}", TYPES[dtype], *(str(number) for number in numbers)])
