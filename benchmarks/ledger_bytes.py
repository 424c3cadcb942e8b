"""The ledger's bytes and errors: the kernels' Metal, run by `tests/metal_harness` at the 1B model's widths."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import mlx_llama3  # first: it puts a fast BLAS in place before MLX is loaded  # noqa: F401
from benchmarks.ledger_models import WIDTHS
from mlx_llama3.model.kernels import add_rms_norm, rope_qkv, sdpa_quantized, swiglu_qmv
from mlx_llama3.model.kernels.kv_packing import PackedLayout, pack, unpack
from mlx_llama3.model.kernels.metal import TYPES
from mlx_llama3.model.layers.packed_linear import PackedLinear
from mlx_llama3.model.layers.rope import RopeTables
from tests.metal_harness.checking.checks import check
from tests.metal_harness.checking.proof import cached_functions
from tests.metal_harness.emulator import Dispatch, emulated
from tests.metal_harness.executor import launch
from tests.metal_harness.mlx_kernels import mlx_kernel

import mlx.core as mx
import mlx.nn as nn

EPS = 1e-5
GROUP = 64
POSITION = 131071
DTYPES = (mx.float16, mx.bfloat16, mx.float32)


@dataclass(frozen=True)
class Use:
    """One call. exact: what float64 gives for the same inputs. composed: as MLX's own operations compute it on Metal:
    products by its own kernel, `affine_qmv_fast`, run like ours; the others in higher precision, rounded to the type
    where an operation stores, which can only be better than they are.
    """

    name: str
    call: Callable[[], Any]
    exact: list[np.ndarray]
    composed: list[np.ndarray]

    def run(self) -> tuple[list[np.ndarray], list[Dispatch]]:
        """The first outputs of the kernel, in float64, and its dispatches."""
        seen: list[Dispatch] = []
        with emulated(*cached_functions(self.call.func), before=seen.append):
            outputs = self.call()
            outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
            mx.eval(outputs)
        return [_double(each) for each in outputs[: len(self.exact)]], seen


def uses(dtype: mx.Dtype) -> Iterator[Use]:
    """One of each kernel."""
    yield _norm(dtype)
    yield _rope(dtype)
    yield from (_swiglu(dtype, bits) for bits in (4, 8))
    yield from (_attention(dtype, bits, length) for length in (900, 4000) for bits in (4, 8))


def _norm(dtype: mx.Dtype) -> Use:
    dim = WIDTHS["1B"].dim
    x, update, weight = (_random((1, 1, dim), dtype, seed) for seed in range(3))
    weight = weight.reshape(-1)
    h, gain = _double(x) + _double(update), _double(weight)
    exact = h / np.sqrt(np.square(h).mean(-1, keepdims=True) + EPS) * gain
    stream = _round(h, dtype)  # what is stored, and normed, by both
    scale = np.float32(1) / np.sqrt(np.square(stream).mean(-1, keepdims=True).astype(np.float32) + np.float32(EPS))
    # MLX's rms_norm rounds before it multiplies by the gains.
    composed = _round(_round(stream * scale, dtype) * gain, dtype)
    return Use("add_rms_norm", partial(add_rms_norm.fused, x, update, weight, EPS), [h, exact], [stream, composed])


def _rope(dtype: mx.Dtype) -> Use:
    widths = WIDTHS["1B"]
    heads = widths.heads + 2 * widths.kv_heads
    qkv = _random((1, 1, heads * widths.head_dim), dtype, 3)
    frequencies = 500000.0 ** (-np.arange(0, widths.head_dim, 2) / widths.head_dim)
    inverse = mx.array(frequencies.astype(np.float32))
    freqs = RopeTables(mx.array(POSITION), inverse, 1.0 / inverse)
    # A far position's angle is off by 0.004 in float32; MLX's rotation takes periods, and inverts them again.
    theirs = np.float32(POSITION) * np.array(1.0 / freqs.periods)
    call = partial(rope_qkv.fused, qkv, widths.heads, widths.kv_heads, POSITION, freqs)
    q = _double(qkv).reshape(heads, 2, -1)[: widths.heads]
    exact, composed = (_turned(q, angles) for angles in (POSITION * frequencies, theirs.astype(np.float64)))
    return Use("rope_qkv", call, [exact], [_round(composed, dtype)])


def _turned(q: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """`(heads, 2, pairs)` -> `(1, heads, 1, head_dim)`."""
    low, high = q[:, 0], q[:, 1]
    turned = [low * np.cos(angles) - high * np.sin(angles), low * np.sin(angles) + high * np.cos(angles)]
    return np.concatenate(turned, axis=-1)[None, :, None]


def _swiglu(dtype: mx.Dtype, bits: int) -> Use:
    widths = WIDTHS["1B"]
    shape = (2 * widths.hidden, widths.dim)
    linear = nn.QuantizedLinear(GROUP, 1, bias=False, group_size=GROUP, bits=bits)
    packed = mx.quantize(_random(shape, mx.float32, 4) * widths.dim**-0.5, group_size=GROUP, bits=bits)
    linear.weight, linear.scales, linear.biases = packed[0], *(each.astype(dtype) for each in packed[1:])
    x = _random((1, 1, widths.dim), dtype, 5)
    scales, biases = linear.scales.astype(mx.float32), linear.biases.astype(mx.float32)
    matrix = _double(mx.dequantize(linear.weight, scales, biases, group_size=GROUP, bits=bits))
    w13 = PackedLinear([linear])
    gate, up = np.split(_double(x) @ matrix.T, 2, axis=-1)
    # MLX rounds both products, the sigmoid and the first product with it.
    g, u = np.split(_mlx_product(linear, x), 2, axis=-1)
    composed = _round(_round(g * _round(1 / (1 + np.exp(-g)), dtype), dtype) * u, dtype)
    exact = gate / (1 + np.exp(-gate)) * up
    return Use(f"swiglu_qmv, {bits} bit", partial(swiglu_qmv.fused, w13, x), [exact], [composed])


def _attention(dtype: mx.Dtype, bits: int, length: int) -> Use:
    """A cache of `length` positions, of which the first 32 and the newest 96 are dense."""
    widths, n_dense = WIDTHS["1B"], 128
    layout, scale = PackedLayout(widths.head_dim, bits), widths.head_dim**-0.5
    shape = (2, 1, widths.kv_heads, length, widths.head_dim)
    kv, q = _random(shape, dtype, 6), _random((1, widths.heads, 1, widths.head_dim), dtype, 7)
    dense, records = mx.contiguous(kv[:, :, :, :n_dense]), pack(kv[:, :, :, n_dense:], layout)
    call = partial(sdpa_quantized.fused, q, dense, records, (n_dense, length - n_dense), scale, layout)
    held = [
        np.concatenate([_double(dense[i]), _double(unpack(records, layout, mx.float32)[i])], axis=2) for i in (0, 1)
    ]
    exact = _attend(_double(q), *held, scale)
    # MLX makes the cache dense in the type of q, then its attention computes in float32.
    theirs = [mx.array(_round(each, dtype).astype(np.float32)) for each in held]
    composed = mx.fast.scaled_dot_product_attention(q.astype(mx.float32), *theirs, scale=scale).astype(dtype)
    return Use(f"sdpa_quantized, {bits} bit values, {length:,} positions", call, [exact], [_double(composed)])


def _attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
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
    given = [buffers.get(each.name, np.array(0)) for each in kernel.buffers]  # the rest is for batches
    launch(kernel, given, (32, 2 * rows // 8, 1), (32, 2, 1), "forward")
    return _double(mx.array(out) if x.dtype == mx.float32 else mx.array(out).view(x.dtype))


def _bits(x: mx.array) -> np.ndarray:
    """Memory of x; NumPy has no bfloat16."""
    return np.array(x if x.dtype == mx.float32 else x.view(mx.uint16))


def print_bytes() -> None:
    """A line a kernel: what leaves memory, every byte once, over inputs and outputs; and what threadgroups read."""
    print("\nbytes at the 1B model's widths, bfloat16, one token: inputs read and outputs written, over their sizes")
    moved = least = 0
    for use in uses(mx.bfloat16):
        passes = [check(dispatch).traffic for dispatch in use.run()[1]]
        traffic = [each for one in passes for each in one if not each.name.endswith(("_shape", "_strides"))]
        # A large input is worth what threadgroups read of it in all; a small one is read from a cache after the first.
        found = sum(max(each.unique_read, each.group_read if each.size > 1 << 16 else 0) for each in traffic)
        found += sum(each.group_written for each in traffic)
        # What one pass writes for the next need not have left the chip.
        between = sum(each.size for one in passes[:-1] for each in one if each.group_written)
        needed = sum(each.size for each in traffic) - 2 * between
        moved, least = moved + found, least + needed
        print(f"  {use.name:<45} {found:>12,} of {needed:>12,}  {found / needed:.4f}")
    print(f"  {'all':<45} {moved:>12,} of {least:>12,}  {moved / least:.4f}")


def print_errors() -> None:
    """A line a kernel and type: errors against float64, relative to the largest value."""
    print("\nlargest and root mean square error against float64, over the largest value: kernel, MLX's operations")
    for dtype in DTYPES:
        for use in uses(dtype):
            found = use.run()[0]
            for number, exact in enumerate(use.exact):
                kernel, composed = (_errors(values[number], exact) for values in (found, use.composed))
                name = f"{use.name}, output {number}"
                print(f"  {str(dtype).split('.')[-1]:<9} {name:<55} {kernel}   {composed}")


def _errors(values: np.ndarray, exact: np.ndarray) -> str:
    difference, largest = np.abs(values.reshape(exact.shape) - exact), np.abs(exact).max()
    return f"{difference.max() / largest:.2e} {np.sqrt(np.square(difference).mean()) / largest:.2e}"


def _random(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _double(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), np.float64)


def _round(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """To the nearest value of `dtype`."""
    return _double(mx.array(x.astype(np.float32)).astype(dtype))
