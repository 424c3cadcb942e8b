"""The demo model decodes through the sources of the shipped kernels, and says what it says without them."""

import pytest

from mlx_llama3 import cpu
from mlx_llama3.cache_settings import CacheSettings
from mlx_llama3.kernels import FUSED, REFERENCE
from mlx_llama3.loading import load_model
from mlx_llama3.quantized_cache import QuantizedKVCache
from mlx_llama3.tokenizer import load_tokenizer

import mlx.core as mx  # isort: skip

from tests.metal.emulator import emulated

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
