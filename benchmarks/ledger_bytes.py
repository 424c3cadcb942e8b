"""The ledger's bytes and errors: the kernels' Metal source, run by `tests/metal_harness` at the 1B model's widths."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import mlx_llama3  # first: it puts a fast BLAS in place before MLX is loaded  # noqa: F401
from benchmarks.ledger_models import WIDTHS
from mlx_llama3.model.kernels import (
    add_rms_norm,
    norm_rope_qkv,
    norm_swiglu_qmv,
    rope_qkv,
    sdpa_quantized,
    swiglu_qmv,
)
from mlx_llama3.model.kernels.kv_packing import PackedLayout, pack, unpack
from mlx_llama3.model.kernels.metal import TYPES
from mlx_llama3.model.layers.packed_linear import PackedLinear
from mlx_llama3.model.layers.rope import RopeTables
from tests.metal_harness.checking.checks import check
from tests.metal_harness.checking.proof import cached_functions
from tests.metal_harness.emulator import Dispatch, emulated
from tests.metal_harness.executor import launch
from tests.metal_harness.host import UNSUPPORTED
from tests.metal_harness.mlx_kernels import mlx_kernel

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

EPS = 1e-5
GROUP = 64
POSITION = 131071
DTYPES = (mx.float16, mx.bfloat16, mx.float32)


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel, with two references.

    exact: the float64 result for the same inputs. composed: the result of MLX's own operations on Metal. Its matrix
    products run MLX's kernel `affine_qmv_fast` in the harness. Its other operations are computed in higher precision
    and rounded to the dtype where MLX stores, which can only be more exact than MLX.
    """

    name: str
    call: Callable[[], Any]
    exact: list[np.ndarray]
    composed: list[np.ndarray]

    def run(self) -> tuple[list[np.ndarray], list[Dispatch]]:
        """(the kernel's first outputs in float64, its dispatches)."""
        dispatches: list[Dispatch] = []
        with emulated(*cached_functions(self.call.func), before=dispatches.append):
            outputs = self.call()
            outputs = [array for _, array in tree_flatten(outputs)]
            mx.eval(outputs)
        return [_double(each) for each in outputs[: len(self.exact)]], dispatches


def kernel_calls(dtype: mx.Dtype) -> Iterator[KernelCall]:
    """The calls of all kernels for one dtype."""
    yield _norm(dtype)
    yield _rope(dtype)
    yield from (_swiglu(dtype, bits) for bits in (4, 8))
    yield from (_norm_rope_qkv(dtype, bits) for bits in (4, 8))
    yield from (_norm_swiglu(dtype, bits) for bits in (4, 8))
    yield from (_attention(dtype, bits, length) for length in (900, 4000) for bits in (4, 8))


def _norm(dtype: mx.Dtype) -> KernelCall:
    inputs, exact, composed = _stream(dtype)
    return KernelCall("add_rms_norm", partial(add_rms_norm.fused, *inputs, EPS), list(exact), list(composed))


Pair = tuple[np.ndarray, np.ndarray]


def _stream(dtype: mx.Dtype) -> tuple[list[mx.array], Pair, Pair]:
    """Stream, update and gains; the new stream and its norm, exact and by MLX's operations."""
    dim = WIDTHS["1B"].dim
    x, update, weight = (_random((1, 1, dim), dtype, seed) for seed in range(3))
    weight = weight.reshape(-1)
    h, gain = _double(x) + _double(update), _double(weight)
    exact = h / np.sqrt(np.square(h).mean(-1, keepdims=True) + EPS) * gain
    stream = _round(h, dtype)  # both store and normalize the rounded sum
    scale = np.float32(1) / np.sqrt(np.square(stream).mean(-1, keepdims=True).astype(np.float32) + np.float32(EPS))
    # MLX's rms_norm rounds before it multiplies by the gains.
    return [x, update, weight], (h, exact), (stream, _round(_round(stream * scale, dtype) * gain, dtype))


def _rope(dtype: mx.Dtype) -> KernelCall:
    widths = WIDTHS["1B"]
    heads = widths.heads + 2 * widths.kv_heads
    qkv = _random((1, 1, heads * widths.head_dim), dtype, 3)
    freqs, *angles = _angles()
    call = partial(rope_qkv.fused, qkv, widths.heads, widths.kv_heads, POSITION, freqs)
    q = _double(qkv).reshape(heads, 2, -1)[: widths.heads]
    exact, composed = (_rotated(q, each) for each in angles)
    return KernelCall("rope_qkv", call, [exact], [_round(composed, dtype)])


def _angles() -> tuple[RopeTables, np.ndarray, np.ndarray]:
    """Tables for a far position; its exact angles, and MLX's."""
    head_dim = WIDTHS["1B"].head_dim
    frequencies = 500000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    inverse = mx.array(frequencies.astype(np.float32))
    freqs = RopeTables(mx.array(POSITION), inverse, 1.0 / inverse)
    # At a far position, float32 angles are off by 0.004. MLX's RoPE takes periods, and inverts them again.
    mlx_angles = np.float32(POSITION) * np.array(1.0 / freqs.periods)
    return freqs, POSITION * frequencies, mlx_angles.astype(np.float64)


def _rotated(q: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """`(heads, 2, pairs)` -> `(1, heads, 1, head_dim)`."""
    low, high = q[:, 0], q[:, 1]
    rotated = [low * np.cos(angles) - high * np.sin(angles), low * np.sin(angles) + high * np.cos(angles)]
    return np.concatenate(rotated, axis=-1)[None, :, None]


def _swiglu(dtype: mx.Dtype, bits: int) -> KernelCall:
    linear, matrix = _matrix(2 * WIDTHS["1B"].hidden, dtype, bits)
    x = _random((1, 1, WIDTHS["1B"].dim), dtype, 5)
    exact, composed = _gated(_double(x) @ matrix.T), _mlx_gated(_mlx_product(linear, x), dtype)
    call = partial(swiglu_qmv.fused, PackedLinear([linear]), x)
    return KernelCall(f"swiglu_qmv, {bits} bit", call, [exact], [composed])


def _matrix(rows: int, dtype: mx.Dtype, bits: int) -> tuple[nn.QuantizedLinear, np.ndarray]:
    """A random quantized matrix, and what it stands for in float64, `(rows, dim)`."""
    dim = WIDTHS["1B"].dim
    linear = nn.QuantizedLinear(GROUP, 1, bias=False, group_size=GROUP, bits=bits)
    packed = mx.quantize(_random((rows, dim), mx.float32, 4) * dim**-0.5, group_size=GROUP, bits=bits)
    linear.weight, linear.scales, linear.biases = packed[0], *(each.astype(dtype) for each in packed[1:])
    scales, biases = linear.scales.astype(mx.float32), linear.biases.astype(mx.float32)
    return linear, _double(mx.dequantize(linear.weight, scales, biases, group_size=GROUP, bits=bits))


def _gated(product: np.ndarray) -> np.ndarray:
    gate, up = np.split(product, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def _mlx_gated(product: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """MLX rounds both matrix products, the sigmoid, and the product with the sigmoid."""
    g, u = np.split(product, 2, axis=-1)
    return _round(_round(g * _round(1 / (1 + np.exp(-g)), dtype), dtype) * u, dtype)


def _norm_swiglu(dtype: mx.Dtype, bits: int) -> KernelCall:
    linear, matrix = _matrix(2 * WIDTHS["1B"].hidden, dtype, bits)
    inputs, (h, normed), (stream, mlx_normed) = _stream(dtype)
    exact = _gated(normed @ matrix.T)
    composed = _mlx_gated(_mlx_product(linear, mx.array(mlx_normed.astype(np.float32)).astype(dtype)), dtype)
    call = partial(norm_swiglu_qmv.fused, *inputs, EPS, PackedLinear([linear]))
    return KernelCall(f"norm_swiglu_qmv, {bits} bit", call, [h, exact], [stream, composed])


def _norm_rope_qkv(dtype: mx.Dtype, bits: int) -> KernelCall:
    widths = WIDTHS["1B"]
    heads = widths.heads + 2 * widths.kv_heads
    linear, matrix = _matrix(heads * widths.head_dim, dtype, bits)
    inputs, (h, normed), (stream, mlx_normed) = _stream(dtype)
    freqs, exact_angles, mlx_angles = _angles()
    q, mlx_q = (
        product.reshape(heads, 2, -1)[: widths.heads]
        for product in (
            normed @ matrix.T,
            _mlx_product(linear, mx.array(mlx_normed.astype(np.float32)).astype(dtype)),
        )
    )
    exact, composed = _rotated(q, exact_angles), _round(_rotated(mlx_q, mlx_angles), dtype)
    heads_and_position = (widths.heads, widths.kv_heads, POSITION, freqs)
    call = partial(norm_rope_qkv.fused, *inputs, EPS, PackedLinear([linear]), *heads_and_position)
    return KernelCall(f"norm_rope_qkv, {bits} bit", call, [h, exact], [stream, composed])


def _attention(dtype: mx.Dtype, bits: int, length: int) -> KernelCall:
    """Attention to a cache of `length` positions, of which the first 32 and the newest 96 are dense."""
    widths, n_dense = WIDTHS["1B"], 128
    layout, scale = PackedLayout(widths.head_dim, bits), widths.head_dim**-0.5
    shape = (2, 1, widths.kv_heads, length, widths.head_dim)
    kv, q = _random(shape, dtype, 6), _random((1, widths.heads, 1, widths.head_dim), dtype, 7)
    dense, packed = mx.contiguous(kv[:, :, :, :n_dense]), pack(kv[:, :, :, n_dense:], layout)
    call = partial(sdpa_quantized.fused, q, dense, packed, (n_dense, length - n_dense), scale, layout)
    dequantized = [
        np.concatenate([_double(dense[i]), _double(unpack(packed, layout, mx.float32)[i])], axis=2) for i in (0, 1)
    ]
    exact = _attention64(_double(q), *dequantized, scale)
    # MLX dequantizes the cache to the dtype of q; its attention then computes in float32.
    mlx_kv = [mx.array(_round(each, dtype).astype(np.float32)) for each in dequantized]
    composed = mx.fast.scaled_dot_product_attention(q.astype(mx.float32), *mlx_kv, scale=scale).astype(dtype)
    return KernelCall(f"sdpa_quantized, {bits} bit values, {length:,} positions", call, [exact], [_double(composed)])


def _attention64(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    keys, values = (each.repeat(q.shape[1] // each.shape[1], axis=1) for each in (keys, values))
    weights = np.exp(scale * q @ keys.swapaxes(-1, -2))
    return weights / weights.sum(-1, keepdims=True) @ values


def _mlx_product(linear: nn.QuantizedLinear, x: mx.array) -> np.ndarray:
    """`(1, dim)` -> `(1, rows)` by MLX's own Metal kernel for one row of x."""
    rows, columns = linear.weight.shape[0], x.shape[-1]
    settings = {"group_size": linear.group_size, "bits": linear.bits, "results_per_simdgroup": 4}
    off = {"batched": "false", "partial_rows": "false", "has_global_scale": "false"}
    kernel = mlx_kernel("quantized.h", "affine_qmv_fast", {"T": TYPES[x.dtype]} | settings | off)
    out = np.zeros((1, rows), np.float32 if x.dtype == mx.float32 else np.uint16)
    buffers = {"w": np.array(linear.weight), "x": _bits(x.reshape(1, -1)), "y": out}
    buffers |= {"scales": _bits(linear.scales), "biases": _bits(linear.biases)}
    buffers |= {"in_vec_size": np.array(columns, np.int32), "out_vec_size": np.array(rows, np.int32)}
    arguments = [buffers.get(each.name, np.array(0)) for each in kernel.buffers]  # the other buffers are for batches
    launch(kernel, arguments, (32, 2 * rows // 8, 1), (32, 2, 1), "forward")
    return _double(mx.array(out) if x.dtype == mx.float32 else mx.array(out).view(x.dtype))


def _bits(x: mx.array) -> np.ndarray:
    """The bits of x, as uint16 for 16-bit dtypes; NumPy has no bfloat16."""
    return np.array(x if x.dtype == mx.float32 else x.view(mx.uint16))


def print_bytes_and_errors() -> None:
    """Print the bytes and the errors of the kernels, or why the harness cannot run them here."""
    if UNSUPPORTED:
        print(f"\nbytes and errors are left out: {UNSUPPORTED}")
        return
    print_bytes()
    print_errors()


def print_bytes() -> None:
    """Print for each kernel the bytes read and written, relative to the sizes of its inputs and outputs."""
    print("\nbytes at the 1B model's widths, bfloat16, one token: inputs read and outputs written, over their sizes;")
    print("then what threadgroups read again of inputs below 64 KB, from a cache")
    moved = least = 0
    for call in kernel_calls(mx.bfloat16):
        passes = [check(dispatch).traffic for dispatch in call.run()[1]]
        traffic = [
            buffer for buffers in passes for buffer in buffers if not buffer.name.endswith(("_shape", "_strides"))
        ]
        # A large input counts for each threadgroup that reads it; a small one counts once, because it stays in a cache.
        traffic_bytes = sum(max(b.unique_read, b.group_read if b.size > 1 << 16 else 0) for b in traffic)
        traffic_bytes += sum(b.group_written + 2 * b.copied for b in traffic)  # a copy is read and written once more
        # The intermediate arrays between two passes may stay on the chip.
        between = sum(b.size for buffers in passes[:-1] for b in buffers if b.group_written)
        needed = sum(b.size for b in traffic) - 2 * between
        moved, least = moved + traffic_bytes, least + needed
        # What every threadgroup reads again of small inputs, from a cache.
        again = sum(b.group_read - b.unique_read for b in traffic if b.size <= 1 << 16)
        ratio = f"{traffic_bytes / needed:.4f}"
        print(f"  {call.name:<45} {traffic_bytes:>12,} of {needed:>12,}  {ratio}  {again:>12,}")
    print(f"  {'all':<45} {moved:>12,} of {least:>12,}  {moved / least:.4f}")


def print_errors() -> None:
    """Print for each kernel and dtype the errors against float64, relative to the largest value."""
    print("\nlargest and root mean square error against float64, over the largest value: kernel, MLX's operations")
    for dtype in DTYPES:
        for call in kernel_calls(dtype):
            outputs = call.run()[0]
            for number, exact in enumerate(call.exact):
                kernel, composed = (_errors(values[number], exact) for values in (outputs, call.composed))
                name = f"{call.name}, output {number}"
                print(f"  {str(dtype).split('.')[-1]:<9} {name:<55} {kernel}   {composed}")


def _errors(values: np.ndarray, exact: np.ndarray) -> str:
    difference, largest = np.abs(values.reshape(exact.shape) - exact), np.abs(exact).max()
    return f"{difference.max() / largest:.2e} {np.sqrt(np.square(difference).mean()) / largest:.2e}"


def _random(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _double(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), np.float64)


def _round(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Round to the nearest value of `dtype`."""
    return _double(mx.array(x.astype(np.float32)).astype(dtype))
