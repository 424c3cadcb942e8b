"""The demo model retrieves a sentence hidden in a long text: within 500 tokens here, up to 6,000 with SOAK=1.

The task is one that a model of 135M weights can do: to repeat a key that it has read. It fails with a wrong RoPE
scaling and with dropped positions, which the tests show.
"""

import os

import pytest

from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.generation.stream import generate
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.layers.rope import Rope
from mlx_llama3.tokenizer.tokenizer import load_tokenizer

KEY = "zebra-4417"
SENTENCES = [
    "The ferry left the harbour before the rain began.",
    "A baker swept the floor and counted the loaves.",
    "Two children drew a map of the old orchard.",
    "The clock above the station was five minutes slow.",
    "Nobody remembered who had painted the blue door.",
    "The librarian stamped each card and smiled.",
]


@pytest.fixture(scope="module")
def demo(demo_folder):
    return load_model(demo_folder), load_tokenizer(demo_folder)


def retrieves(demo, sentences: int, depth: float) -> tuple[bool, int]:
    """Whether the model repeats the key, and how many tokens it read."""
    model, tokenizer = demo
    text = [SENTENCES[(i * i + i // 3) % len(SENTENCES)] for i in range(sentences)]
    text.insert(int(depth * sentences), f"The secret password is {KEY}.")
    ids = tokenizer.encode(" ".join([*text, "The secret password is"]), bos=True)
    said = "".join(step.text for step in generate(model, tokenizer, ids, max_tokens=8))
    return KEY in said, len(ids)


@pytest.mark.parametrize("depth", [0.1, 0.6])
def test_finds_the_key(demo, depth):
    ok, length = retrieves(demo, 40, depth)
    assert ok and 400 < length < 500


def test_can_fail(demo, monkeypatch):
    model, _ = demo
    with monkeypatch.context() as patch:
        scaled = Rope(model.args)
        # All wavelengths: Llama's scaling has no effect on short texts. A GPU takes their reciprocal, the periods.
        scaled._inv_freq, scaled.periods = scaled._inv_freq / 32, scaled.periods * 32
        patch.setattr(model, "rope", scaled)
        assert not retrieves(demo, 40, 0.6)[0]
    monkeypatch.setattr(KVCache, "positions", lambda self, length: 0)
    assert not retrieves(demo, 40, 0.6)[0]


@pytest.mark.skipif("SOAK" not in os.environ, reason="minutes; make soak")
@pytest.mark.parametrize("sentences", [390, 640])
@pytest.mark.parametrize("depth", [0.02, 0.25, 0.5, 0.75, 0.98])
def test_finds_the_key_in_a_long_text(demo, sentences, depth):
    ok, length = retrieves(demo, sentences, depth)
    print(f"{length} tokens, depth {depth}: {'found' if ok else 'not found'}")
    assert ok
