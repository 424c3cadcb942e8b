import pytest

from tests.metal_harness.source import Parameter, generated, parse_parameters

import mlx.core as mx

SOURCE = """
    uint i = thread_position_in_grid.x;
    out[i] = T(big[i] + few[N] * one + float(big_ndim + big_shape[0]) + float(big_strides[0]));
    if (FLAG) { total[0] = thread_index_in_simdgroup; }
"""


def call(source=SOURCE, **changes):
    kernel = mx.fast.metal_kernel("sample", ["big", "few", "one"], ["out", "total"], source, "// header\n")
    inputs = [mx.zeros((4, 8)), mx.zeros((7,), mx.float16), mx.array(2.0)]
    template = [("T", mx.bfloat16), ("FLAG", True), ("N", 3)]
    grid = {"grid": (32, 1, 1), "threadgroup": (64, 1, 1)}
    outputs = {"output_shapes": [(32,), (1,)], "output_dtypes": [mx.bfloat16, mx.uint32]}
    return kernel, {"inputs": inputs, "template": template, **grid, **outputs, **changes}


def test_the_text_is_what_mlx_prints(capfd):
    kernel, arguments = call()
    made = generated(kernel, **arguments)
    capfd.readouterr()
    generated(kernel, **arguments, verbose=True)
    assert made.source.strip() in capfd.readouterr().out
    assert made.source.startswith("// header\ntemplate <typename T, bool FLAG, int N>\n[[kernel]] void " + made.name)
    assert SOURCE in made.source


def test_parameters():
    kernel, arguments = call()
    made = generated(kernel, **arguments)
    found = {parameter.name: parameter for parameter in made.parameters}
    assert found["big"] == Parameter("big", "float", "device", True, False, "buffer(0)")
    assert found["few"] == Parameter("few", "float16_t", "constant", True, False, "buffer(4)")  # under 8 elements
    assert found["one"] == Parameter("one", "float", "constant", True, True, "buffer(5)")  # no axes
    assert found["big_shape"] == Parameter("big_shape", "int", "constant", True, False, "buffer(1)")
    assert found["big_strides"] == Parameter("big_strides", "int64_t", "constant", True, False, "buffer(2)")
    assert found["big_ndim"] == Parameter("big_ndim", "int", "constant", True, True, "buffer(3)")
    assert found["out"] == Parameter("out", "bfloat16_t", "device", False, False, "buffer(6)")
    attribute = "thread_position_in_grid"
    assert found[attribute] == Parameter(attribute, "uint3", "", False, False, attribute)
    assert found["thread_index_in_simdgroup"].type == "uint"
    assert [parameter.name for parameter in made.buffers] == [name for name in found if "thread" not in name]


def test_template():
    kernel, arguments = call()
    made = generated(kernel, **arguments)
    assert made.template == (("typename T", "bfloat16_t"), ("bool FLAG", "1"), ("int N", "3"))
    source = "out[0] = bfloat16_t(big[0]);"
    kernel, arguments = call(source, template=None)
    assert generated(kernel, **arguments).template == ()


def test_options():
    kernel, arguments = call()
    assert generated(kernel, **arguments).row_contiguous
    assert generated(kernel, **arguments).init_value is None
    assert generated(kernel, **arguments, init_value=0).init_value == 0
    kernel = mx.fast.metal_kernel("s", ["a"], ["b"], "b[0] = a[0];", ensure_row_contiguous=False, atomic_outputs=True)
    shapes = {"output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    made = generated(kernel, inputs=[mx.zeros(9)], grid=(1, 1, 1), threadgroup=(1, 1, 1), **shapes)
    assert not made.row_contiguous
    assert made.parameters[1].type == "atomic<float>"


def test_parameters_in_mlx_own_style():
    source = """
template <typename T, int D, int V = D>
[[kernel]] void other(const device T* queries [[buffer(0)]]) {}
[[kernel]] void attention(
    const device T* queries [[buffer(0)]],
    const constant int& stride
    [[buffer(15), function_constant(has_mask)]],
    constant int& size,
    uint3 tid [[threadgroup_position_in_grid]]) {}"""
    assert parse_parameters(source, "attention") == (
        Parameter("queries", "T", "device", True, False, "buffer(0)"),
        Parameter("stride", "int", "constant", True, True, "buffer(15), function_constant(has_mask)"),
        Parameter("size", "int", "constant", False, True, ""),
        Parameter("tid", "uint3", "", False, False, "threadgroup_position_in_grid"),
    )


def test_what_is_no_kernel():
    with pytest.raises(ValueError, match="no kernel missing"):
        parse_parameters("[[kernel]] void present(uint i [[x]]) {}", "missing")
    with pytest.raises(ValueError, match="cannot read the kernel parameter"):
        parse_parameters("[[kernel]] void odd(...) {}", "odd")
    with pytest.raises(ValueError, match="made 0"):
        generated(lambda inputs, **options: [inputs[0] + 1], inputs=[mx.zeros(3)])


def test_a_call_that_mlx_refuses():
    kernel, arguments = call(output_shapes=[(32,)])
    with pytest.raises(ValueError, match="output_shapes"):
        generated(kernel, **arguments)
