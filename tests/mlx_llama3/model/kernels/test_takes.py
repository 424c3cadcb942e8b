"""Which inputs the kernels take. Each refusal has a neighbour that is taken; the reference runs for what is refused.

`test_sdpa_quantized.py` has those of `sdpa_quantized`.
"""

from functools import partial

import pytest
from tiny_models import tiny_args, tiny_model

from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.kernels import add_rms_norm, norm_rope_qkv, norm_swiglu_qmv, rope_qkv, swiglu_qmv
from mlx_llama3.model.kernels.kernel_set import FUSED, REFERENCE
from mlx_llama3.model.layers.packed_linear import PackedLinear
from mlx_llama3.model.layers.rope import RopeTables

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32


@pytest.fixture
def no_kernels(monkeypatch):
    """A call of a kernel raises, with Metal too."""

    def refuse(*_, name: str, **__):
        raise AssertionError(f"{name} was called")

    monkeypatch.setattr(mx.fast, "metal_kernel", refuse)


def norm_inputs(shape, update=None, dim=None, dtypes=(F32, F32, F32)):
    """Arrays that are never evaluated, so that large ones take no memory."""
    shapes = (shape, shape if update is None else update, (shape[-1] if dim is None else dim,))
    return [mx.zeros(each, dtype) for each, dtype in zip(shapes, dtypes, strict=True)]


@pytest.mark.parametrize(
    ("taken", "refused"),
    [
        (norm_inputs((2, 3, 64)), norm_inputs((2, 3, 64), update=(1, 3, 64))),
        (norm_inputs((2, 3, 64)), norm_inputs((2, 3, 64), update=(2, 1, 64))),
        (norm_inputs((1, 1, 64)), norm_inputs((1, 1, 64), update=(1, 1, 1))),
        (norm_inputs((1, 1, 64)), norm_inputs((1, 1, 1), update=(1, 1, 1), dim=64)),
        (norm_inputs((1, 1, 64)), norm_inputs((1, 64))),
        (norm_inputs((1, 1, 64)), norm_inputs((1, 1, 64, 64))),
        (norm_inputs((1, 1, 64)), norm_inputs((1, 1, 66))),
        (norm_inputs((1, 1, 8)), norm_inputs((1, 1, 4))),
        (norm_inputs((1, 1, 32768)), norm_inputs((1, 1, 32772))),
        (norm_inputs((1, 2**19 - 1, 8192)), norm_inputs((1, 2**19, 8192))),
        (norm_inputs((1, 1, 64), dtypes=(F16, F16, F16)), norm_inputs((1, 1, 64), dtypes=(F16, F32, F16))),
        (norm_inputs((1, 1, 64), dtypes=(BF16, BF16, BF16)), norm_inputs((1, 1, 64), dtypes=(F16, F16, BF16))),
        (norm_inputs((1, 1, 64)), norm_inputs((1, 1, 64), dtypes=3 * (mx.int32,))),
    ],
    ids=lambda inputs: " ".join(f"{list(each.shape)}" for each in inputs),
)
def test_what_add_rms_norm_takes(taken, refused):
    assert add_rms_norm.takes(*taken)
    assert not add_rms_norm.takes(*refused)


def rope_inputs(heads=(4, 2), head_dim=8, B=2, S=1, offset=(), dtype=F32, freqs=F32, width=None):
    qkv = mx.zeros((B, S, (heads[0] + 2 * heads[1]) * head_dim if width is None else width), dtype)
    inv_freq = mx.ones((head_dim // 2,), freqs)
    return qkv, *heads, 0, RopeTables(mx.zeros(offset, mx.int32), inv_freq, inv_freq)


@pytest.mark.parametrize(
    ("taken", "refused"),
    [
        ({}, {"heads": (5, 2), "width": 64}),
        ({"offset": (2,)}, {"offset": (3,)}),
        ({"offset": (2,)}, {"offset": (1,)}),
        ({"offset": ()}, {"offset": (2, 1)}),
        ({"dtype": BF16}, {"dtype": mx.int32}),
        ({"dtype": F16}, {"dtype": F16, "freqs": F16}),
        ({"head_dim": 2048}, {"head_dim": 2050}),
        ({"head_dim": 64, "S": 2**22 - 1}, {"head_dim": 64, "S": 2**22}),
    ],
    ids=str,
)
def test_what_rope_qkv_takes(taken, refused):
    assert rope_qkv.takes(*rope_inputs(**taken))
    assert not rope_qkv.takes(*rope_inputs(**refused))


def packed(bits=4, group=32, dim=64, hidden=8, mode="affine", dtype=F32):
    parts = [nn.QuantizedLinear(dim, hidden, bias=False, group_size=group, bits=bits, mode=mode) for _ in range(2)]
    for part in parts:
        if mode == "affine":
            part.scales, part.biases = part.scales.astype(dtype), part.biases.astype(dtype)
    return PackedLinear(parts)


def of_size(hidden, dim):
    """w1 and w3 whose arrays are never evaluated: they take no memory."""
    matrix = packed().parts[0]
    matrix.weight = mx.zeros((2 * hidden, dim // 8), mx.uint32)
    matrix.scales = matrix.biases = mx.zeros((2 * hidden, dim // 32))
    w13 = packed()
    w13.parts = [matrix]
    return w13


def in_two_dtypes(name):
    """Matrices whose scales or biases are float32, and the others float16."""
    w13 = packed(dtype=F16)
    w13.parts[0][name] = w13.parts[0][name].astype(F32)
    return w13


def with_additive_bias():
    w13 = packed()
    w13.parts[0].bias = mx.arange(16.0)
    return w13


def x_of(rows=4, dim=64, dtype=F32):
    return mx.zeros((1, rows, dim), dtype)


MIXED = PackedLinear([nn.QuantizedLinear(64, 8, bias=False, group_size=32, bits=bits) for bits in (4, 8)])
DENSE = PackedLinear([nn.Linear(64, 8, bias=False) for _ in range(2)])


@pytest.mark.parametrize(
    ("taken", "refused"),
    [
        ((packed(), x_of()), (packed(), x_of(5))),
        ((packed(), mx.zeros((4, 1, 64))), (packed(), mx.zeros((5, 1, 64)))),
        ((packed(bits=8, group=64), x_of()), (packed(bits=3), x_of())),
        ((packed(), x_of()), (packed(mode="mxfp4"), x_of())),
        ((packed(hidden=12), x_of()), (packed(hidden=6), x_of())),
        ((packed(dtype=F16), x_of(dtype=F16)), (packed(dtype=F16), x_of())),
        ((packed(dtype=F16), x_of(dtype=F16)), (in_two_dtypes("biases"), x_of(dtype=F16))),
        ((packed(dtype=F16), x_of(dtype=F16)), (in_two_dtypes("scales"), x_of(dtype=F16))),
        ((packed(), x_of()), (with_additive_bias(), x_of())),
        ((packed(), x_of()), (MIXED, x_of())),
        ((packed(), x_of()), (DENSE, x_of())),
        ((of_size(2**15 - 4, 2**16), x_of(1, 2**16)), (of_size(2**15, 2**16), x_of(1, 2**16))),
    ],
    ids=str,
)
def test_what_swiglu_qmv_takes(taken, refused):
    assert swiglu_qmv.takes(*taken)
    assert not swiglu_qmv.takes(*refused)


def norm_product(shape=(1, 4, 64), matrix=None, **inputs):
    return *norm_inputs(shape, **inputs), packed() if matrix is None else matrix


@pytest.mark.parametrize(
    ("taken", "refused"),
    [
        (norm_product(), norm_product((1, 5, 64))),
        (norm_product(), norm_product(update=(4, 1, 64))),
        (norm_product(), norm_product(dim=1)),
        (norm_product((1, 4, 64)), norm_product((4, 64))),
        (norm_product(matrix=packed(dtype=F16), dtypes=3 * (F16,)), norm_product(matrix=packed(dtype=F16))),
        (norm_product(), norm_product(dtypes=(F32, F16, F32))),
        (norm_product(), norm_product(dtypes=(F32, F32, F16))),
        (norm_product(), norm_product(matrix=DENSE)),
    ],
    ids=str,
)
def test_what_norm_swiglu_qmv_takes(taken, refused):
    assert norm_swiglu_qmv.takes(*taken)
    assert not norm_swiglu_qmv.takes(*refused)


def projection(heads=(2, 1), head_dim=4, offset=(), freqs=F32, shape=(2, 2, 64), rows=16, **inputs):
    """The arguments of `norm_rope_qkv` but eps; `packed` has two matrices of half the rows."""
    wqkv = packed(hidden=rows // 2)
    return *norm_inputs(shape, **inputs), wqkv, *rope_inputs(heads, head_dim, offset=offset, freqs=freqs)[1:]


@pytest.mark.parametrize(
    ("taken", "refused"),
    [
        ({}, {"shape": (1, 5, 64)}),
        ({}, {"update": (1, 1, 64)}),
        ({}, {"freqs": F16}),
        ({"heads": (2, 1), "head_dim": 4}, {"heads": (2, 3), "head_dim": 2}),
        ({"heads": (2, 1)}, {"heads": (3, 1)}),
        ({"offset": (2,)}, {"offset": (1,)}),
        ({"offset": ()}, {"offset": (2, 1)}),
    ],
    ids=str,
)
def test_what_norm_rope_qkv_takes(taken, refused):
    assert norm_rope_qkv.takes(*projection(**taken))
    assert not norm_rope_qkv.takes(*projection(**refused))


def with_eps(inputs):
    return *inputs[:3], 1e-5, *inputs[3:]


def test_the_references_run_for_what_is_refused(no_kernels):
    for module, arguments in (
        (norm_swiglu_qmv, with_eps(norm_product((1, 5, 64)))),
        (norm_rope_qkv, with_eps(projection(freqs=F16))),
        (add_rms_norm, (*norm_inputs((1, 3, 66)), 1e-5)),
        (rope_qkv, rope_inputs(dtype=F16, freqs=F16)),
        (swiglu_qmv, (with_additive_bias(), x_of())),
    ):
        ours, expected = (as_tuple(function(*arguments)) for function in (module.fused, module.reference))
        assert all(mx.array_equal(a, b).item() for a, b in zip(ours, expected, strict=True))


def as_tuple(outputs):
    """The arrays of one output, or of several, side by side."""
    return [each for _, each in tree_flatten(outputs)]


def test_a_model_that_no_kernel_takes_decodes_by_the_references(tmp_path, no_kernels):
    """Heads of 2112, a stream of 66 numbers, dense matrices."""
    model = tiny_model(tmp_path, tiny_args(dim=66, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=2112))
    model.rope.frequencies = partial(model.rope.frequencies, table=False)  # as on a GPU
    logits = []
    for kernels in (REFERENCE, FUSED):
        model.use(kernels)
        cache = model.make_cache(CacheSettings(kv_bits=4))
        logits.append(mx.concatenate([model(mx.array([[token]]), at, cache) for at, token in enumerate((3, 14, 15))]))
    assert mx.allclose(*logits, atol=1e-5).item()
