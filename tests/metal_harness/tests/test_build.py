"""Translation and compilation: language, types, arithmetic, the cache."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from tests.metal_harness import build
from tests.metal_harness.tests.snippets import dispatch_of, first_line

import mlx.core as mx

ONE = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}


def values(source, inputs=None, count=8, dtype=mx.float32, **options):
    """What one thread that runs `source` writes into `out`."""
    inputs = inputs or {"unused": mx.zeros(1)}
    (out,) = dispatch_of(source, inputs, {"out": ((count,), dtype)}, **{**ONE, **options}).run()
    return out.tolist()


def test_errors_name_the_line_of_the_metal_source():
    dispatch = dispatch_of("float x = 1;\nout[0] = x + wrong;", {"a": mx.zeros(1)}, {"out": ((1,), mx.float32)})
    with pytest.raises(build.BuildError, match=rf"snippet\S*\.metal:{first_line(dispatch) + 1}:\d+: error: .*'wrong'"):
        build.library(dispatch.kernel)


def test_the_line_is_right_behind_a_template():
    source = "\n\nout[0] = wrong;"
    template = [("T", mx.float32), ("N", 4)]
    dispatch = dispatch_of(source, {"a": mx.zeros(1)}, {"out": ((1,), mx.float32)}, template=template)
    lines = dispatch.kernel.source.splitlines()
    number = next(index for index, line in enumerate(lines, 1) if "wrong" in line)
    with pytest.raises(build.BuildError, match=rf"\.metal:{number}:\d+: error"):
        build.library(dispatch.kernel)


def test_template_types():
    source = "out[0] = T(2.5f); out[1] = N; out[2] = FLAG ? 1 : 0; out[3] = sizeof(T);"
    number = -7 if tuple(map(int, mx.__version__.split(".")[:3])) >= (0, 32, 4) else 7  # MLX put a minus into the name
    for dtype, first, size in ((mx.float32, 2.5, 4), (mx.int32, 2, 4), (mx.float16, 2.5, 2), (mx.uint8, 2, 1)):
        template = [("T", dtype), ("N", number), ("FLAG", True)]
        assert values(source, count=4, template=template) == [first, number, 1, size]


def test_header_with_templates_and_address_spaces():
    header = """
        template <typename T, int N>
        inline T total(const device T* x, thread T& largest) {
          T sum = 0;
          for (int i = 0; i < N; i++) { sum += x[i]; largest = metal::max(largest, x[i]); }
          return sum;
        }
        struct Pair { float a; float b; float sum() const thread { return a + b; } };
    """
    source = "float most = 0; out[0] = total<float, 8>(x, most); out[1] = most; Pair p = {1, 2}; out[2] = p.sum();"
    assert values(source, {"x": mx.arange(8.0)}, count=3, header=header) == [28, 7, 3]


def test_template_arguments_are_deduced_through_address_spaces():
    header = """
        template <typename T> inline void take(const device T* x, thread T& y) { y = x[1]; }
        template <typename T> inline void set(thread T* y, T value) { *y = value; }
        template <typename T> inline T twice(thread const T& y) { T z = y; return z * 2; }
        template <typename T> inline T last(threadgroup T* shared, const thread T& y) { return shared[1] + y; }
        struct Sum {
          float total;
          void add(float x) thread { total += x; }
          float get() const thread { return total; }
        };
    """
    source = """
        float y[2];
        threadgroup float shared[2];
        shared[1] = 40;
        take(x, y[0]);
        set(y + 1, x[2]);
        out[0] = y[0]; out[1] = y[1]; out[2] = twice(y[1]); out[3] = twice(x[0] + 1); out[4] = twice(few[1]);
        out[5] = last(shared, x[3]);
        Sum sum = {1};
        sum.add(few[0]);
        out[6] = sum.get();
        thread float* p = y;
        for (thread float& each : y) { each += 1; }
        out[7] = p[1];
    """
    inputs = {"x": mx.arange(8.0), "few": mx.array([5.0, 6.0])}
    assert values(source, inputs, header=header) == [1, 2, 4, 2, 12, 43, 6, 3]


def test_vectors():
    source = """
        float4 a = float4(1, float2(2, 3), 4);
        half2 h = half2(a.zw);
        a.xy = a.yx;
        vec<float, 2> v = vec<float, 2>(5, 6);
        float4 b = static_cast<float4>(int4(7, 8, 9, 10));
        uint2 bits = as_type<uint2>(float2(1, 2));
        out[0] = a.x; out[1] = h.y; out[2] = v[1]; out[3] = b.w; out[4] = as_type<float>(bits.y);
        out[5] = dot(a, float4(1)); out[6] = max(a, b).z; out[7] = float3(0).x + float(sizeof(float3));
    """
    assert values(source) == [2, 4, 6, 10, 2, 10, 9, 16]


def test_a_vector_of_the_wrong_length():
    with pytest.raises(build.BuildError, match="number of elements"):
        values("out[0] = float4(1, 2, 3).x;")


def test_half_rounds_after_each_operation():
    rng = np.random.default_rng(0)
    a, b, c = (rng.normal(size=64).astype(np.float16) for _ in range(3))
    source = "half p = a[i] * b[i]; half s = p + c[i]; half d = s / a[i]; out[i] = d - b[i];"
    inputs = {name: mx.array(value) for name, value in (("a", a), ("b", b), ("c", c))}
    dispatch = dispatch_of("uint i = thread_position_in_grid.x;" + source, inputs, {"out": ((64,), mx.float16)})
    assert np.array_equal(np.array(dispatch.run()[0]), (a * b + c) / a - b)


def test_bfloat_rounds_after_each_operation():
    keys = mx.random.split(mx.random.key(0), 3)
    a, b, c = (mx.random.normal((64,), key=key).astype(mx.bfloat16) for key in keys)
    source = "bfloat16_t p = a[i] * b[i]; bfloat16_t s = p + c[i]; out[i] = s / a[i];"
    inputs = {"a": a, "b": b, "c": c}
    dispatch = dispatch_of("uint i = thread_position_in_grid.x;" + source, inputs, {"out": ((64,), mx.bfloat16)})
    want = ((a * b).astype(mx.bfloat16) + c).astype(mx.bfloat16) / a
    assert mx.array_equal(dispatch.run()[0], want)


def test_conversion_between_half_and_bfloat():
    source = "half h = half(x[0]); bfloat16_t b = static_cast<bfloat16_t>(h);"
    source += "out[0] = b; out[1] = static_cast<half>(b);"
    assert values(source, {"x": mx.array([1.005])}, count=2) == [1.0078125, 1.0078125]


def test_literals_are_float():
    """0.1 as a double and as a float differ once they are added to a float."""
    want = (np.float32(16777216) + np.float32(0.1) * np.float32(10)).item()
    assert values("out[0] = x[0] + 0.1 * 10.0; out[1] = sizeof(0.1);", {"x": mx.array([16777216.0])}, 2) == [want, 4]


FUNCTIONS = ["exp", "exp2", "log", "log2", "sin", "cos", "tanh", "sqrt", "floor", "ceil", "rint", "trunc", "abs"]


@pytest.mark.parametrize("space", ["metal::", "metal::precise::", "metal::fast::"])
def test_functions(space):
    names = FUNCTIONS if space == "metal::" else FUNCTIONS[:8]
    x = np.linspace(0.1, 9, 64, dtype=np.float32)
    source = "uint i = thread_position_in_grid.x;\n"
    source += "\n".join(f"out[{n} * 64 + i] = {space}{name}(x[i]);" for n, name in enumerate(names))
    (out,) = dispatch_of(source, {"x": mx.array(x)}, {"out": ((len(names), 64), mx.float32)}).run()
    want = np.array([getattr(np, name)(x.astype(np.float64)) for name in names])
    np.testing.assert_allclose(np.array(out), want, rtol=3e-7)


def test_functions_of_half_round_once():
    x = np.linspace(0.1, 9, 64, dtype=np.float16)
    source = "uint i = thread_position_in_grid.x; out[i] = metal::exp(x[i]);"
    (out,) = dispatch_of(source, {"x": mx.array(x)}, {"out": ((64,), mx.float16)}).run()
    assert np.array_equal(np.array(out), np.exp(x.astype(np.float32)).astype(np.float16))


def test_extremes():
    source = """
        out[0] = Limits<float>::finite_min; out[1] = Limits<float>::min; out[2] = metal::max(NAN, x[0]);
        out[3] = metal::isnan(NAN); out[4] = metal::exp(-INFINITY); out[5] = metal::numeric_limits<int>::max();
        out[6] = metal::clamp(9.0f, x[0], 2.0f); out[7] = metal::numeric_limits<uint8_t>::max();
    """
    largest = float(np.finfo(np.float32).max)
    assert values(source, {"x": mx.array([1.0])}) == [-largest, -np.inf, 1, 1, 0, 2.0**31, 2, 255]


def test_integers():
    source = """
        out[0] = metal::popcount(255u); out[1] = metal::clz(1u); out[2] = metal::ctz(8u); out[3] = metal::min(-3, 2);
        out[4] = uint8_t(300); out[5] = int8_t(200); out[6] = -7 / 2; out[7] = metal::mulhi(1u << 31, 6u);
    """
    assert values(source, dtype=mx.int32) == [8, 31, 3, -3, 44, -56, -3, 3]


def test_each_kernel_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("METAL_ON_CPU_CACHE", str(tmp_path))
    kernel = dispatch_of("out[0] = 1;", {"a": mx.zeros(1)}, {"out": ((1,), mx.float32)}).kernel
    other = replace(kernel, source=kernel.source.replace("= 1", "= 2"))
    first, second = build.libraries([kernel, other])
    assert first.parent == tmp_path
    assert first != second
    built = first.stat().st_mtime_ns
    assert build.library(kernel) == first
    assert first.stat().st_mtime_ns == built
    assert build.library(kernel, build.Mode("slow", ("-O0",), ("-O0",))) not in (first, second)


def test_two_builds_at_once(monkeypatch, tmp_path):
    """Both have begun before either has ended: what is under the final name is always a whole file."""
    monkeypatch.setenv("METAL_ON_CPU_CACHE", str(tmp_path))
    both, found = threading.Barrier(2, timeout=20), []

    def make(path):
        path.write_text("first half")
        both.wait()
        path.write_text("first half, second half")

    def one_build():
        found.append(build._cached("thing", ".txt", ("key",), make))

    threads = [threading.Thread(target=one_build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert found[0].read_text() == "first half, second half"
    assert list(tmp_path.glob("*.txt")) == [found[0]]


def test_a_failed_build_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("METAL_ON_CPU_CACHE", str(tmp_path))
    kernel = dispatch_of("out[0] = wrong;", {"a": mx.zeros(1)}, {"out": ((1,), mx.float32)}).kernel
    with pytest.raises(build.BuildError):
        build.library(kernel)
    assert not list(tmp_path.glob("*.so"))
