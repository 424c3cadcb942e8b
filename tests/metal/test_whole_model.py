"""The demo model decodes through the sources of the shipped kernels, and says what it says without them."""

import numpy as np
import pytest

from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.model.cache.quantized import QuantizedKVCache
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.hooks.norms import NormCapture
from mlx_llama3.model.kernels.kernel_set import FUSED, REFERENCE
from mlx_llama3.model.layers import tiled_linear as cpu
from mlx_llama3.tokenizer.tokenizer import load_tokenizer
from tests.metal_harness.emulator import emulated

import mlx.core as mx

TOKENS = 12


@pytest.fixture(scope="module")
def model(demo_folder):
    """With quantized matrices, as on the GPU; on the CPU the loader would unpack them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "expand", lambda model, dtype: None)
        return load_model(demo_folder)


@pytest.fixture
def small_blocks(monkeypatch):
    """A quantized cache that packs positions of a text of a dozen tokens."""
    for name, value in {"FIRST": 2, "NEWEST": 2, "BLOCK": 4, "ROOM": 2 + 2 + 4 + QuantizedKVCache.FEW}.items():
        monkeypatch.setattr(QuantizedKVCache, name, value)


def greedy(model, prompt: list[int], settings: CacheSettings) -> tuple[list[int], list[mx.array]]:
    """The most likely tokens after `prompt`, and the logits `(vocab,)` that they came from."""
    cache, tokens, logits = model.make_cache(settings), list(prompt), []
    fed = mx.array([prompt])
    while len(tokens) < len(prompt) + TOKENS:
        logits.append(model(fed, cache[0].offset, cache)[0, -1])
        tokens.append(mx.argmax(logits[-1]).item())
        fed = mx.array([tokens[-1:]])
    return tokens[len(prompt) :], logits


# Of logits of about 20, in float32. A number between two steps of a quantized cache may be packed as either.
@pytest.mark.parametrize(("kv_bits", "tolerance"), [(None, 5e-4), (4, 1e-2)])
def test_the_same_tokens_with_and_without_kernels(model, demo_folder, small_blocks, kv_bits, tolerance):
    settings = CacheSettings(kv_bits=kv_bits)
    prompt = load_tokenizer(demo_folder).encode("The capital of France is", bos=False)
    model.use(REFERENCE)
    wanted, wanted_logits = greedy(model, prompt, settings)
    model.use(FUSED)
    with emulated() as emulation:
        tokens, logits = greedy(model, prompt, settings)
    assert tokens == wanted
    largest = max(mx.abs(a - b).max().item() for a, b in zip(logits, wanted_logits, strict=True))
    assert largest <= tolerance
    layers = len(model.layers)
    assert emulation.called("llama3_rope_qkv") == layers * TOKENS
    assert emulation.called("llama3_add_rms_norm") == 2 * layers * TOKENS
    # The prompt has more positions than this one takes at a time.
    assert emulation.called("llama3_swiglu_qmv") == layers * (TOKENS - 1)
    assert emulation.called("llama3_sdpa_quantized") == (0 if kv_bits is None else layers * TOKENS)


def test_live_norms_come_out_of_the_kernels(model, demo_folder):
    """A prompt and two tokens: the norms of the references, the same logits with and without norms, no kernel more."""
    ids = load_tokenizer(demo_folder).encode("The capital of France is", bos=False)
    model.use(REFERENCE)
    wanted, _ = with_norms(model, ids)
    model.use(FUSED)
    with emulated() as emulation:
        norms, logits = with_norms(model, ids)
        cache = model.make_cache()
        mx.eval(model(mx.array([ids[:-2]]), 0, cache))
        plain = [model(mx.array([[token]]), cache[0].offset, cache) for token in ids[-2:]]
        assert all(mx.array_equal(a, b).item() for a, b in zip(logits, plain, strict=True))
    assert norms.shape == (5, len(model.layers), len(ids))
    np.testing.assert_allclose(norms, wanted, rtol=1e-4)
    assert emulation.called("llama3_add_rms_norm") == 2 * 2 * len(model.layers) * 3


def with_norms(model, ids: list[int]) -> tuple[np.ndarray, list[mx.array]]:
    """Norms `(5, n_layers, T)` of a prompt of all but two of `ids`, and those two one at a time, and their logits."""
    capture, cache = NormCapture(model), model.make_cache()
    logits = [capture.model(mx.array([piece]), cache[0].offset, cache) for piece in (ids[:-2], ids[-2:-1], ids[-1:])]
    return capture.read(capture.take()), logits[1:]
