"""The drop-in for `mx.fast.metal_kernel`: data in and out of MLX, and its place in a program."""

import functools

import numpy as np
import pytest

from tests.metal_harness.build import BuildError
from tests.metal_harness.emulator import emulated
from tests.metal_harness.executor import KernelError

import mlx.core as mx

ONE_THREAD = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}


def run(source, inputs, shape=(4,), dtype=mx.float32, call=None, **options):
    """The one output of a kernel with `inputs` by name, made and called under emulation."""
    with emulated():
        kernel = mx.fast.metal_kernel("sample", list(inputs), ["out"], source, **options)
        outputs = {"output_shapes": [shape], "output_dtypes": [dtype]}
        (out,) = kernel(inputs=list(inputs.values()), **outputs, **{**ONE_THREAD, **(call or {})})
    return out


DTYPES = ["float32", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("name", [*DTYPES, "bool_"])
def test_values_go_in_and_out_unchanged(name):
    dtype = getattr(mx, name)
    x = mx.array([0, 1, 100, 3, 5, 7, 9, 120, 2]).astype(dtype)
    out = run("for (int k = 0; k < 9; k++) { out[k] = x[8 - k]; }", {"x": x}, (3, 3), dtype)
    assert out.dtype == dtype
    assert mx.array_equal(out, x[::-1].reshape(3, 3))


def test_infinities_and_nan_of_bfloat():
    x = mx.array([np.inf, -np.inf, np.nan, 1e-30]).astype(mx.bfloat16)
    out = run("for (int k = 0; k < 4; k++) { out[k] = -x[k]; }", {"x": x}, dtype=mx.bfloat16)
    assert mx.array_equal(out, -x, equal_nan=True)


def test_small_inputs_and_numbers():
    """Under 8 elements an input is `constant`, without axes a reference; Python numbers become arrays."""
    inputs = {"few": mx.array([1.0, 2, 3]), "one": mx.array(10.0), "number": 100.0, "many": mx.full((8,), 1000.0)}
    assert run("out[0] = few[2] + one + number + many[7];", inputs, (1,)).tolist() == [1113]


def test_shape_strides_and_axes_of_an_input():
    x = mx.zeros((2, 3, 5))
    source = "out[0] = x_ndim; for (int a = 0; a < x_ndim; a++) { out[1 + a] = x_shape[a]; out[4 + a] = x_strides[a]; }"
    assert run(source, {"x": x}, (7,), mx.int32).tolist() == [3, 2, 3, 5, 15, 5, 1]


STRIDED = {
    "transposed": mx.arange(24.0).reshape(4, 6).T,
    "sliced": mx.arange(48.0).reshape(6, 8)[:, 1:5],
    "broadcast": mx.broadcast_to(mx.arange(4.0), (6, 4)),
    "reversed": mx.arange(24.0).reshape(6, 4)[::-1],
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("row_contiguous", [True, False])
def test_strided_inputs(name, row_contiguous):
    """Copied into rows by default; as they are with `ensure_row_contiguous=False`, with their strides."""
    x = STRIDED[name]
    index = "k" if row_contiguous else "elem_to_loc(k, x_shape, x_strides, x_ndim)"
    source = f"for (int k = 0; k < 24; k++) {{ out[k] = x[{index}]; }} out[24] = x_strides[0]; out[25] = x_strides[1];"
    out = run(source, {"x": x}, (26,), ensure_row_contiguous=row_contiguous).tolist()
    assert out[:24] == x.reshape(-1).tolist()
    strides = [stride // 4 for stride in np.array(x, copy=False).strides]
    assert out[24:] == ([4, 1] if row_contiguous else strides)


def test_what_is_not_written_is_nan_or_the_initial_value():
    source = "out[1] = x[0];"
    x = {"x": mx.array([7.0])}
    assert np.isnan(np.array(run(source, x)))[[0, 2, 3]].all()
    assert run(source, x, call={"init_value": 0}).tolist() == [0, 7, 0, 0]
    assert run(source, x, dtype=mx.bfloat16, call={"init_value": 1.5}).tolist() == [1.5, 7, 1.5, 1.5]
    assert run("if (x[0] < 0) { out[0] = 1; }", x, (), mx.float16, call={"init_value": 2}).item() == 2


def test_atomic_outputs():
    source = "uint i = thread_position_in_grid.x; atomic_fetch_add_explicit(&out[i % 4], x[i], memory_order_relaxed);"
    call = {"init_value": 0, "grid": (40, 1, 1), "threadgroup": (16, 1, 1)}
    out = run(source, {"x": mx.arange(40.0)}, call=call, atomic_outputs=True)
    assert out.tolist() == [180, 190, 200, 210]


def test_empty_arrays():
    assert run("out[0] = x_shape[0];", {"x": mx.zeros((0, 3))}, (1,)).tolist() == [0]
    assert run("", {"x": mx.zeros(3)}, (0, 2), call={"grid": (0, 1, 1)}).shape == (0, 2)


def test_several_outputs_and_templates():
    source = "uint i = thread_position_in_grid.x; first[i] = T(x[i]) / N; second[i] = uint(i) + FLAG;"
    with emulated() as emulation:
        kernel = mx.fast.metal_kernel("two", ["x"], ["first", "second"], source)
        call = {"grid": (10, 1, 1), "threadgroup": (4, 1, 1), "output_shapes": [(2, 5), (10,)]}
        for dtype, number, flag in ((mx.float32, 2, True), (mx.int32, 3, False), (mx.float32, 2, True)):
            template = [("T", dtype), ("N", number), ("FLAG", flag)]
            outputs = {"output_dtypes": [dtype, mx.uint32]}
            first, second = kernel(inputs=[mx.arange(10.0)], template=template, **outputs, **call)
            want = mx.arange(10.0) / number if dtype == mx.float32 else mx.arange(10) // number
            assert mx.array_equal(first.reshape(-1), want)
            assert mx.array_equal(second, mx.arange(10) + int(flag))
    assert emulation.calls == {"two": 3}
    assert emulation.called("tw") == 3
    assert emulation.called("x") == 0


def test_inputs_that_are_not_evaluated_yet_and_outputs_in_a_graph():
    x = mx.arange(4.0) * 2
    out = run("for (int k = 0; k < 4; k++) { out[k] = x[k] + 1; }", {"x": x + 1})
    assert mx.sum(out * 2).item() == 2 * (2 + 4 + 6 + 8)


def test_an_input_that_is_not_aligned_for_vectors():
    """MLX's own memory begins 8 bytes behind a multiple of 16, and a slice anywhere: Metal's buffers are aligned."""
    source = "float4 v = *(const device float4*)x; out[0] = v.x + v.w;"
    x = mx.arange(16.0)
    mx.eval(x)
    assert run(source, {"x": x}, (1,)).item() == 3
    assert run(source, {"x": x[4:]}, (1,)).item() == 11


def test_copies_that_mlx_makes_in_silence_are_counted():
    matrix = mx.arange(24.0).reshape(4, 6).astype(mx.bfloat16)
    inputs = [matrix.T, matrix[1:3], matrix[:, 1:3], mx.broadcast_to(mx.array(3.0), (8,))]
    names = ["turned", "rows", "columns", "same"]
    call = {"output_shapes": [(1,)], "output_dtypes": [mx.float32], **ONE_THREAD}
    for row_contiguous in (True, False):
        with emulated() as emulation:
            options = {"ensure_row_contiguous": row_contiguous}
            kernel = mx.fast.metal_kernel("copies", names, ["out"], "out[0] = same[0];", **options)
            for _ in range(2):
                kernel(inputs=inputs, **call)
        sizes = {("copies", "turned"): 48, ("copies", "columns"): 16, ("copies", "same"): 32}
        assert emulation.copied == ({key: 2 * size for key, size in sizes.items()} if row_contiguous else {})


def named(name: str, source: str):
    kernel = mx.fast.metal_kernel(name, ["x"], ["out"], source)
    call = {"output_shapes": [(1,)], "output_dtypes": [mx.float32], **ONE_THREAD}
    return kernel(inputs=[mx.ones(9)], **call)[0].item()


def test_one_name_for_two_sources_is_an_error():
    with emulated():
        assert named("a", "out[0] = x[0] * 2;") == named("a", "out[0] = x[0] * 2;") == 2
        assert named("b", "out[0] = x[0] + 2;") == 3
        with pytest.raises(KernelError, match="custom_kernel_a.*: two kernels have this name"):
            named("a", "out[0] = x[0] + 2;")
    with emulated():
        assert named("a", "out[0] = x[0] + 2;") == 3


def test_one_kernel_with_other_inputs_is_not_two_of_one_name():
    """MLX puts types, and which inputs are `constant`, into the name."""
    with emulated():
        kernel = mx.fast.metal_kernel("inputs", ["x"], ["out"], "out[0] = x[0];")
        call = {"output_shapes": [(1,)], "output_dtypes": [mx.float32], **ONE_THREAD}
        for x in (mx.ones(7), mx.ones(8), mx.ones(8, mx.float16)):
            assert kernel(inputs=[x], **call)[0].item() == 1


@pytest.mark.parametrize(("limit", "threads", "runs"), [(896, 896, True), (896, 897, False), (1024, 1025, False)])
def test_more_threads_than_the_kernel_may_have(limit, threads, runs):
    """MLX looks at the threadgroup as it is asked for, though it then cuts it to the grid."""
    with emulated(max_threads=limit) as emulation:
        kernel = mx.fast.metal_kernel("wide", ["x"], ["out"], "out[0] = x[0];")
        call = {"grid": (1, 1, 1), "threadgroup": (threads, 1, 1), "output_shapes": [(1,)]}
        if runs:
            kernel(inputs=[mx.ones(8)], output_dtypes=[mx.float32], **call)
        else:
            with pytest.raises(ValueError, match=rf"Thread group size \({threads}\) is greater than .* \({limit}\)"):
                kernel(inputs=[mx.ones(8)], output_dtypes=[mx.float32], **call)
    assert emulation.called("wide") == runs


@pytest.mark.parametrize(("count", "takes"), [(29, True), (30, False)])
def test_at_most_31_buffers(count, takes):
    """Inputs, a shape that the source names, and the output."""
    inputs = {f"x{i}": mx.ones(8) for i in range(count)}
    source = "out[0] = x0_shape[0];"
    if takes:
        assert run(source, inputs, (1,)).item() == 8
    else:
        with pytest.raises(BuildError, match="32 buffers, Metal takes at most 31"):
            run(source, inputs, (1,))


def test_inputs_are_not_changed():
    x = mx.arange(16.0)
    run("((device float*)x)[0] = 5; out[0] = x[0];", {"x": x})
    assert x[0].item() == 0


def test_outside_of_the_block_everything_is_as_before():
    before = mx.fast.metal_kernel
    with emulated():
        made = mx.fast.metal_kernel("sample", ["x"], ["out"], "out[0] = x[0];")
        assert mx.fast.metal_kernel is not before
        with emulated(order="reverse"):
            pass
        assert mx.fast.metal_kernel is not before
    assert mx.fast.metal_kernel is before
    if not mx.metal.is_available():
        call = {"inputs": [mx.zeros(4)], "output_shapes": [(4,)], "output_dtypes": [mx.float32]}
        with pytest.raises(RuntimeError, match="No Metal back-end"):
            mx.eval(made(**call, **ONE_THREAD))


def test_an_error_ends_the_emulation():
    before = mx.fast.metal_kernel
    with pytest.raises(KernelError, match="custom_kernel_sample"), emulated():
        kernel = mx.fast.metal_kernel("sample", ["x"], ["out"], "out[0] = 7 / (int(x[0]) - 1);")
        kernel(inputs=[mx.ones(1)], output_shapes=[(4,)], output_dtypes=[mx.float32], **ONE_THREAD)
    assert mx.fast.metal_kernel is before


def test_kernels_that_a_cached_function_made_before():
    @functools.cache
    def kernel():
        return mx.fast.metal_kernel("cached", ["x"], ["out"], "out[0] = x[0] + 1;")

    kernel()
    with emulated(kernel) as emulation:
        call = {"output_shapes": [(1,)], "output_dtypes": [mx.float32], **ONE_THREAD}
        assert kernel()(inputs=[mx.ones(1)], **call)[0].item() == 2
    assert emulation.calls == {"cached": 1}


def test_compiled_functions_run_uncompiled():
    with emulated() as emulation:
        kernel = mx.fast.metal_kernel("inner", ["x"], ["out"], "out[0] = x[0] * 3;")

        @mx.compile
        def step(x):
            call = {"output_shapes": [(1,)], "output_dtypes": [mx.float32], **ONE_THREAD}
            return kernel(inputs=[x + 1], **call)[0] + 1

        assert [step(mx.array([value])).item() for value in (1.0, 2.0)] == [7, 10]
    assert emulation.calls == {"inner": 2}
    seen = []
    compiled = mx.compile(lambda x: seen.append(1) or x + 1)
    mx.eval(compiled(mx.ones(1)), compiled(mx.ones(1)))
    assert len(seen) == 1  # compiled again: traced once


def test_recorded_dispatches_can_be_run_again():
    source = "uint i = thread_position_in_grid.x; out[i] = x[i] + simd_prefix_inclusive_sum(1.0f);"
    with emulated(record=True) as emulation:
        kernel = mx.fast.metal_kernel("again", ["x"], ["out"], source)
        call = {"grid": (40, 1, 1), "threadgroup": (40, 1, 1)}
        (out,) = kernel(inputs=[mx.arange(40.0)], output_shapes=[(40,)], output_dtypes=[mx.float32], **call)
    (dispatch,) = emulation.dispatches
    assert dispatch.name == "again"
    assert source in dispatch.kernel.source
    for order in ("forward", "reverse", 9):
        assert mx.array_equal(dispatch.run(order)[0], out)


def test_arguments_that_mlx_refuses():
    with pytest.raises(ValueError, match="output_shapes"), emulated():
        kernel = mx.fast.metal_kernel("sample", ["x"], ["out"], "out[0] = 1;")
        kernel(inputs=[mx.ones(1)], output_shapes=[], output_dtypes=[mx.float32], **ONE_THREAD)
