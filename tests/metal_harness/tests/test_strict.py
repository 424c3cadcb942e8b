import pytest

from tests.metal_harness.checking.strict import strict
from tests.metal_harness.mlx_kernels import mlx_kernel
from tests.metal_harness.tests.snippets import dispatch_of, first_line

import mlx.core as mx

GOOD = """
uint i = thread_position_in_grid.x;
threadgroup float parts[32];
float kept[4] = {0.0f, 1.0f, 2.0f, 3.0f};
thread float* own = kept;
const device T* from = x + 3;
const constant float& first = w[0];
parts[thread_index_in_simdgroup] = simd_sum(float(from[0]) * first + own[i % 4]);
threadgroup_barrier(mem_flags::mem_threadgroup);
half h = half(parts[0]);
float4 four = float4(h, 1, 2, 3);
y[i] = static_cast<T>(twice(four.x + four.yzw.y, kept)) + T(2);
"""
HEADER = "template <typename U> U twice(U value, thread float* kept) { return 2 * value + kept[0]; }\n"


def dispatch(body, header=HEADER, dtype=mx.bfloat16):
    inputs = {"x": mx.zeros((64,), dtype), "w": mx.zeros((4,)), "offset": mx.array(3)}
    return dispatch_of(body, inputs, {"y": ((64,), dtype)}, header=header, template=[("T", dtype)])


def findings(body, header=HEADER, dtype=mx.bfloat16):
    return strict(dispatch(body, header, dtype).kernel)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_good_code_passes(dtype):
    assert findings(GOOD, dtype=dtype) == []


# A line, what is said of it, and what stands before the kernel.
BAD = [
    ("float kept[4]; float* p = kept;", "pointer or reference without an address space in a declaration"),
    ("float one = 1; float& p = one;", "pointer or reference without an address space in a declaration"),
    ("float kept[4]; y[0] = T(((float*)kept)[1]);", "pointer or reference without an address space in a cast"),
    ("y[0] = T(reinterpret_cast<const float*>(x)[1]);", "pointer or reference without an address space in a cast"),
    ("thread float* p = x;", "clang: cannot initialize a variable of type '__private float *"),
    ("device T* p = (device T*)x;", "drops const qualifier"),
    ("x[0] = T(1);", "clang: read-only variable is not assignable"),
    ("w[0] = 1;", "clang: read-only variable is not assignable"),
    ("offset = 1;", "clang: cannot assign to variable 'offset'"),
    ("double d = 1;", "double: "),
    ("float a = x[0] * 2.0;", "literal without f"),
    ("y[0] = float(x[0]);", "implicit conversion to bfloat"),
    ("y[0] = half(1);", "clang: assigning to 'bfloat16_t'"),
    ("y[0] = 1;", "implicit conversion to bfloat"),
    ("T a = true ? 1.0f : x[0];", "implicit conversion to bfloat"),
    ("y[0] += 1.0f;", "compound assignment converts float to bfloat"),
    ("auto f = [](int i) { return i; }; y[f(0)] = T(0);", "a lambda"),
    ("again: if (w[0] > 1) goto again;", "goto"),
    ("static int count = 3; y[0] = T(count);", "static variable"),
    ("float a; y[0] = T(a);", "clang: variable 'a' is uninitialized"),
    ("y[0] = T(float(quad_xor(3u)));", "quad_xor: not used in MLX's own Metal sources"),
    ("threadgroup float four[4]; threadgroup float(*p)[4] = &four; y[0] = T((*p)[0]);", "pointer to array"),
    ("for (uint i = 0; i < 3; i++) { threadgroup float inner[4]; inner[i] = 0; }", "clang: "),
    ("no_such_function(w[0]);", "clang: use of undeclared identifier 'no_such_function'"),
]


@pytest.mark.parametrize(("line", "said"), BAD, ids=[line for line, _ in BAD])
def test_bad_line_is_found(line, said):
    """In the second line of the body, and nowhere else."""
    tested = dispatch(f"\nuint unused = 0;\n{line}\n")
    found = strict(tested.kernel)
    assert any(said in finding.text for finding in found), found
    assert {finding.line for finding in found} == {tested.kernel.source.splitlines().index(line) + 1}


# In these, MLX makes a parameter of a word that the body does not use, or uses elsewhere too.
MISREAD = [
    ("y[0] = T(0);  // a row of x_shape", "x_shape in a comment"),
    ("/* not\nw_ndim */ y[0] = T(0);", "w_ndim in a comment"),
    ("uint max_strides = 1; y[0] = T(max_strides);", "max_strides contains x_strides"),
    ("uint x_shape_0 = 1; y[0] = T(x_shape_0);", "x_shape_0 contains x_shape"),
    (
        "uint threads_per_grid_row = 1; y[0] = T(threads_per_grid_row);",
        "threads_per_grid_row contains threads_per_grid",
    ),
    ("y[thread_position_in_grid.x] = T(0);  // thread_position_in_grid", "thread_position_in_grid in a comment"),
]


@pytest.mark.parametrize(("line", "said"), MISREAD, ids=[line for line, _ in MISREAD])
def test_a_word_that_mlx_takes_for_a_parameter_is_found(line, said):
    (finding,) = findings(line)
    assert said in finding.text


def test_words_that_are_parameters_and_words_elsewhere_pass():
    """One attribute's name can hold another's; a header's words make no parameters."""
    good = "y[0] = T(x_shape[0] + x_strides[0] + x_ndim + dispatch_threads_per_threadgroup.x);"
    assert findings(good, header="// x_ndim, thread_index_in_simdgroup\n") == []
    assert findings("uint wide_shape = 1; y[0] = T(wide_shape);") == []


def test_bfloat_in_a_kernel_of_other_types_is_found():
    body = "y[0] = T(float(bfloat16_t(w[0])));"
    assert findings(body) == []
    (finding,) = findings(body, dtype=mx.float16)
    assert finding.text == "bfloat16_t in a kernel without an input or output of this type"
    assert findings("y[0] = T(0);  // not bfloat", dtype=mx.float16) == []


BAD_HEADERS = [
    ("float first(float* p) { return p[0]; }", "pointer or reference without an address space"),
    ("struct S { float a[3]; thread float& at(int i) thread { return a[i]; } };", "a method that returns a reference"),
    ("struct S { device float* p; float* q; };", "pointer or reference without an address space"),
    ("inline double half_of(double x) { return x / 2; }", "double"),
]


@pytest.mark.parametrize(("header", "said"), BAD_HEADERS, ids=[header for header, _ in BAD_HEADERS])
def test_bad_header_is_found(header, said):
    found = findings("y[0] = T(0);", header + "\n")
    assert any(finding.line == 1 and said in finding.text for finding in found), found


def test_lines_are_those_of_the_generated_source():
    tested = dispatch("\nfloat kept[4];\n\nfloat* p = kept;\n")
    (finding,) = strict(tested.kernel)
    assert finding.line == first_line(tested) + 3


def test_comments_and_members_are_no_names():
    assert findings("// quad_xor\n/* rotate\n popcount */ float4 a = float4(1.0f); y[0] = T(a.wzyx.x);\n") == []


# Where the rules are stricter than Apple's compiler, MLX's kernels have findings; otherwise none.
STRICTER = ("literal without f", "drops const qualifier", "&__private")


@pytest.mark.parametrize(
    ("header", "name", "template"),
    [
        ("sdpa_vector.h", "sdpa_vector", {"T": "bfloat16_t", "D": 64, "V": 64}),
        ("sdpa_vector.h", "sdpa_vector_2pass_2", {"T": "float16_t", "D": 64}),
        ("softmax.h", "softmax_single_row", {"T": "bfloat16_t", "AccT": "float", "N_READS": 4}),
        (
            "quantized.h",
            "affine_qmv_fast",
            {"T": "bfloat16_t", "group_size": 64, "bits": 4, "batched": "false", "partial_rows": "false"}
            | {"has_global_scale": "false", "results_per_simdgroup": 4},
        ),
    ],
)
def test_mlx_own_kernels_pass(header, name, template):
    found = strict(mlx_kernel(header, name, template))
    assert [finding for finding in found if not any(known in finding.text for known in STRICTER)] == []
