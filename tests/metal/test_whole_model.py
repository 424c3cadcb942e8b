"""The demo model generates the same tokens with the shipped Metal kernels, run on the CPU, as without them.

Both as it is, and with compiled blocks. `mx.compile` does nothing here, so that the kernels in a compiled block run on
the CPU too: the Python of the block's halves runs for every token.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.model.cache.double_buffered import DoubleBufferedKVCache
from mlx_llama3.model.cache.quantized import QuantizedKVCache
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.hooks.norms import NormCapture
from mlx_llama3.model.kernels.kernel_set import FUSED, REFERENCE, Rows
from mlx_llama3.model.layers import tiled_linear
from mlx_llama3.tokenizer.tokenizer import load_tokenizer
from tests.metal_harness.emulator import emulated

import mlx.core as mx

TOKENS = 12
APART = replace(FUSED, norm_rope_qkv=Rows.NONE, norm_swiglu_qmv=Rows.NONE)


@pytest.fixture(scope="module")
def model(demo_folder):
    """The demo model with quantized matrices, as on the GPU; for the CPU the loader would dequantize them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled_linear, "use_tiled_layers", lambda model, dtype: None)
        return load_model(demo_folder)


@pytest.fixture(params=[False, True], ids=["plain", "compiled"])
def compiles(request, model, monkeypatch):
    """Whether decoding runs compiled blocks, as on a GPU."""
    if request.param:
        monkeypatch.setattr(model, "compiles", True)
        monkeypatch.setattr(model.rope, "frequencies", partial(model.rope.frequencies, table=False))
    return request.param


def halves_in_use(model) -> set[tuple[frozenset[str], bool]]:
    """The variants of compiled halves that the blocks made, each (kernels, watched)."""
    blocks = model.compiled_blocks.of(model.layers) if model.compiles else []
    return {variant for block in blocks for variant in block._residual_halves}


@pytest.fixture
def small_blocks(monkeypatch):
    """Make blocks of the quantized cache so small that a text of a dozen tokens is packed."""
    for name, value in {"FIRST": 2, "NEWEST": 2, "BLOCK": 4, "ROOM": 2 + 2 + 4 + QuantizedKVCache.FEW}.items():
        monkeypatch.setattr(QuantizedKVCache, name, value)


def greedy(model, prompt: list[int], settings: CacheSettings) -> tuple[list[int], list[mx.array]]:
    """The tokens of greedy decoding after `prompt`, and the logits `(vocab_size,)` of each."""
    cache, tokens, logits = model.make_cache(settings), list(prompt), []
    fed = mx.array([prompt])
    while len(tokens) < len(prompt) + TOKENS:
        logits.append(model(fed, cache[0].offset, cache)[0, -1])
        tokens.append(mx.argmax(logits[-1]).item())
        fed = mx.array([tokens[-1:]])
    return tokens[len(prompt) :], logits


# Tolerance for float32 logits of about 20. A number halfway between two quantization steps may be packed as either.
@pytest.mark.parametrize(
    ("compiles", "kernels", "kv_bits", "tolerance"),
    [(False, FUSED, None, 5e-4), (False, APART, None, 5e-4), (False, FUSED, 4, 1e-2), (True, FUSED, 4, 1e-2)],
    indirect=["compiles"],
    ids=["plain", "apart", "quantized cache", "compiled"],
)
def test_the_same_tokens_with_and_without_kernels(
    model, demo_folder, compiles, small_blocks, kernels, kv_bits, tolerance
):
    settings = CacheSettings(kv_bits=kv_bits)
    prompt = load_tokenizer(demo_folder).encode("The capital of France is", bos=False)
    model.use(REFERENCE)
    wanted, wanted_logits = greedy(model, prompt, settings)
    model.use(kernels)
    assert isinstance(model.make_cache(settings)[0], DoubleBufferedKVCache if kv_bits is None else QuantizedKVCache)
    with emulated() as emulation:
        tokens, logits = greedy(model, prompt, settings)
        assert halves_in_use(model) == ({(kernels.at(1), False)} if compiles else set())
    assert tokens == wanted
    assert not emulation.copied  # inputs of all kernels lie in memory as they read them
    largest = max(mx.abs(a - b).max().item() for a, b in zip(logits, wanted_logits, strict=True))
    assert largest <= tolerance
    # The prompt has more positions than the products take.
    layers, decoded = len(model.layers), TOKENS - 1
    expected = {
        "rope_qkv": layers + decoded,  # of the first layer, whose norm has no add before it
        "add_rms_norm": 2 * layers + decoded,  # the last norm
        "norm_rope_qkv": (layers - 1) * decoded,
        "swiglu_qmv": 0,
        "norm_swiglu_qmv": layers * decoded,
        "sdpa_quantized": 0 if kv_bits is None else layers * TOKENS,
    }
    if kernels == APART:
        expected |= {"rope_qkv": layers * TOKENS, "add_rms_norm": 2 * layers * TOKENS, "swiglu_qmv": layers * decoded}
        expected |= {"norm_rope_qkv": 0, "norm_swiglu_qmv": 0}
    assert {name: emulation.called(f"llama3_{name}") for name in expected} == expected


def test_live_norms_come_from_the_kernels(model, demo_folder, compiles):
    """The norms are those of the references. Measuring them changes no logits and adds no kernel call."""
    ids = load_tokenizer(demo_folder).encode("The capital of France is", bos=False)
    model.use(REFERENCE)
    wanted, _ = with_norms(model, ids)
    model.use(FUSED)
    with emulated() as emulation:
        norms, logits = with_norms(model, ids)
        assert halves_in_use(model) == ({(FUSED.at(1), True)} if compiles else set())
        cache = model.make_cache()
        mx.eval(model(mx.array([ids[:-2]]), 0, cache))
        plain = [model(mx.array([[token]]), cache[0].offset, cache) for token in ids[-2:]]
        assert all(mx.array_equal(a, b).item() for a, b in zip(logits, plain, strict=True))
    assert norms.shape == (5, len(model.layers), len(ids))
    np.testing.assert_allclose(norms, wanted, rtol=1e-4)
    layers = len(model.layers)
    assert emulation.called("llama3_add_rms_norm") == 2 * 3  # twice three passes, of which each has a last norm
    assert emulation.called("llama3_norm_rope_qkv") == 2 * 3 * (layers - 1)
    assert emulation.called("llama3_norm_swiglu_qmv") == 2 * 3 * layers


def with_norms(model, ids: list[int]) -> tuple[np.ndarray, list[mx.array]]:
    """Feed `ids` as a prompt, the last two one at a time: the norms `(5, n_layers, T)`, and the logits of those two."""
    capture, cache = NormCapture(model), model.make_cache()
    logits = [capture.model(mx.array([piece]), cache[0].offset, cache) for piece in (ids[:-2], ids[-2:-1], ids[-1:])]
    return capture.read(capture.take()), logits[1:]
