"""The stand-in's devices and streams behave as MLX's with Metal, and what it computes is rounded as a GPU rounds."""

import json

import pytest

from tests.mac.compute import COMPILED, KERNELS, MODES
from tests.mac.gpu import FACTS
from tests.mac.tests.conftest import on_a_mac

HEAD = "import json, threading, mlx_llama3, mlx.core as mx\nfrom mlx_llama3.autotune.choice import has_metal\n"


def found(mode: str, program: str) -> object:
    """What the program, which sets `found`, finds under the stand-in."""
    done = on_a_mac(mode, "-c", f"{HEAD}{program}\nprint(json.dumps(found))")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_default_device_follows_streams_and_settings():
    program = """
gpu, cpu, found = mx.gpu, mx.cpu, []
def note(): found.append([mx.default_device() == gpu, has_metal()])
note()
with mx.stream(cpu):
    note()
    with mx.stream(gpu): note()
    note()
with mx.stream(mx.new_stream(cpu)): note()
with mx.stream(mx.new_stream(gpu)): note()
with mx.stream(mx.default_stream(cpu)): note()
with mx.stream(mx.new_thread_local_stream(gpu)): note()
mx.set_default_device(cpu); note()
thread = threading.Thread(target=note); thread.start(); thread.join()
mx.set_default_device(gpu); note()
"""
    expected = [1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1]
    assert found(COMPILED, program) == [[bool(each), bool(each)] for each in expected]


def test_streams_have_their_device_and_compute():
    program = """
found = [mx.default_stream(mx.gpu).device == mx.gpu, mx.default_stream(mx.cpu).device == mx.cpu]
found += [mx.new_stream(mx.gpu).device == mx.gpu, mx.default_stream(mx.gpu) == mx.default_stream(mx.gpu)]
with mx.stream(mx.cpu): found.append(mx.default_stream(mx.gpu).device == mx.gpu)
def compute():
    with mx.stream(mx.new_stream(mx.cpu)): found.append((mx.ones(3) + 1).sum().item() == 6)
thread = threading.Thread(target=compute); thread.start(); thread.join()
x = mx.add(mx.ones(3), 1, stream=mx.new_stream(mx.gpu)); mx.synchronize(); found.append(x.sum().item() == 6)
"""
    assert found(COMPILED, program) == [True] * 7


def test_what_metal_says_of_itself_and_refuses():
    program = """
info = mx.device_info(mx.gpu)
limit = info["max_recommended_working_set_size"]
found = [info, mx.device_info() == info, "max_buffer_length" in mx.device_info(mx.cpu), mx.metal.is_available()]
found += [mx.set_wired_limit(limit), mx.set_wired_limit(0), mx.device_count(mx.gpu), mx.is_available(mx.gpu)]
try: mx.set_wired_limit(limit + 1)
except ValueError as error: found.append(str(error))
"""
    limit = FACTS["device_info"]["max_recommended_working_set_size"]
    expected = [FACTS["device_info"], True, False, True, 0, limit, 1, True, FACTS["wired_limit_error"]]
    assert found(COMPILED, program) == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_kernel_runs_but_not_on_the_cpu_and_not_within_a_compiled_graph(mode):
    program = """
from mlx_llama3.model.kernels import add_rms_norm
from tests.mac.compute import kernel_calls
x = mx.random.normal((1, 2, 64)); w = mx.ones(64)
near = lambda pair: bool(mx.allclose(pair[1], add_rms_norm.reference(x, x, w, 1e-5)[1], atol=1e-5).item())
found = [near(add_rms_norm.fused(x, x, w, 1e-5)), sum(kernel_calls().values())]
graph = mx.compile(lambda x: add_rms_norm.fused(x, x, w, 1e-5))
found += [near(graph(x)), near(graph(x)), sum(kernel_calls().values())]
with mx.stream(mx.cpu):
    try: add_rms_norm.fused(x, x, w, 1e-5)
    except ValueError as error: found.append(str(error))
"""
    ran = 1 if mode == COMPILED else 3
    assert found(mode, program) == [True, 1, True, True, ran, FACTS["kernel_on_cpu_error"]]


def test_products_in_16_bits_are_rounded_once():
    program = """
found = []
for dtype, step in ((mx.float16, 2**-10), (mx.bfloat16, 2**-7)):
    x = mx.random.normal((1, 512), key=mx.random.key(1)).astype(dtype)
    w = mx.random.normal((256, 512), key=mx.random.key(2)).astype(dtype)
    for rows in (1, 40):
        many = mx.repeat(x, rows, axis=0)
        for settings in ({"bits": 4, "group_size": 64}, {"bits": 4, "group_size": 32, "mode": "mxfp4"}):
            packed = mx.quantize(w, **settings)
            wide = [each if each.dtype != dtype else each.astype(mx.float32) for each in packed]
            # One row is multiplied in float32 all along; for many, Metal dequantizes the matrix in 16 bits.
            dense = mx.dequantize(*(wide if rows == 1 else packed), **settings).astype(mx.float32)
            y = mx.quantized_matmul(many, *packed, **settings)
            exact = (many.astype(mx.float32) @ dense.T).astype(dtype)
            found.append(y.dtype == dtype and (mx.abs(y - exact) <= 1e-3 + step * mx.abs(exact)).all().item())
    q, k = mx.random.normal((2, 1, 4, 16, 64), key=mx.random.key(3)).astype(dtype)
    y = mx.fast.scaled_dot_product_attention(q, k, k, scale=0.1, mask="causal")
    wide = (each.astype(mx.float32) for each in (q, k, k))
    exact = mx.fast.scaled_dot_product_attention(*wide, scale=0.1, mask="causal").astype(dtype)
    found.append(mx.array_equal(y, exact).item())
w32 = mx.quantize(mx.ones((64, 64)), bits=4, group_size=32)
found.append(mx.quantized_matmul(mx.ones((1, 64), mx.float16), *w32, bits=4, group_size=32).dtype == mx.float32)
"""
    assert found(KERNELS, program) == [True] * 11
