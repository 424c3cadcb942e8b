"""Live norms against the norms of tapped states, stored values of Meta's computation, and the run without a trace."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_model

from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.generation.stream import generate
from mlx_llama3.model.hooks.norms import POINTS, NormCapture
from mlx_llama3.model.hooks.taps import tapped
from mlx_llama3.tokenizer.tokenizer import load_tokenizer

import mlx.core as mx

DATA = Path(__file__).parents[3] / "data"
TOKENS = mx.array([[3, 14, 159, 26, 5, 35]])


def states(model, tokens) -> dict[tuple[int, str], np.ndarray]:
    """Every tapped activation of one pass, float64 `(S, dim)`, by (layer, name)."""
    activations = {}

    def hook(layer, name, value):
        activations[layer, name] = np.array(value[0], dtype=np.float64)
        return value

    tapped(model, hook)(tokens)
    return activations


def test_norms_are_those_of_the_states(tmp_path):
    model = tiny_model(tmp_path)
    capture, expected = NormCapture(model), states(model, TOKENS)
    logits = capture.model(TOKENS)
    norms = capture.read(capture.take())
    assert norms.shape == (5, 3, 6) and norms.dtype == np.float32
    for i, point in enumerate(POINTS):
        for layer in range(3):
            np.testing.assert_allclose(norms[i, layer], np.linalg.norm(expected[layer, point], axis=-1), rtol=1e-5)
    assert mx.array_equal(logits, model(TOKENS)).item()


def test_the_stream_is_the_sum_of_its_updates(tmp_path):
    """`h[l+1] = h[l] + attn[l] + mlp[l]`; the embedding plus all updates is the final residual stream."""
    model = tiny_model(tmp_path)
    activations = states(model, TOKENS)
    stream = np.array(model.tok_embeddings(TOKENS)[0], dtype=np.float64)
    for layer in range(3):
        np.testing.assert_allclose(activations[layer, "resid_pre"], stream, atol=1e-5)
        stream = stream + activations[layer, "attn_out"]
        np.testing.assert_allclose(activations[layer, "resid_mid"], stream, atol=1e-5)
        stream = stream + activations[layer, "mlp_out"]
        np.testing.assert_allclose(activations[layer, "resid_post"], stream, atol=1e-5)
    np.testing.assert_allclose(np.array(model.residual(TOKENS)[0]), stream, atol=1e-5)


@pytest.mark.parametrize("chunk", [4, 512])
def test_traced_generation(tmp_path, demo_folder, chunk):
    model, tokenizer = tiny_model(tmp_path), load_tokenizer(demo_folder)
    ids = TOKENS[0].tolist()
    options = {"max_tokens": 7, "prefill_chunk": chunk}
    plain = list(generate(model, tokenizer, ids, **options))
    traced = list(generate(model, tokenizer, ids, trace=True, **options))
    assert [s.token for s in traced] == [s.token for s in plain]
    assert plain[0].norms is None
    assert [s.norms.shape for s in traced] == [(5, 3, 6)] + [(5, 3, 1)] * 6
    fed = mx.array([ids + [s.token for s in traced[:-1]]])
    activations = states(model, fed)
    norms = np.concatenate([s.norms for s in traced], axis=-1)
    for i, point in enumerate(POINTS):
        expected = np.stack([np.linalg.norm(activations[layer, point], axis=-1) for layer in range(3)])
        np.testing.assert_allclose(norms[i], expected, rtol=1e-4)


def test_demo_model_against_stored_norms(demo_folder):
    model, tokenizer = load_model(demo_folder), load_tokenizer(demo_folder)
    for case in json.loads((DATA / "smollm2-greedy.json").read_text()):
        (step,) = generate(model, tokenizer, case["prompt_ids"], max_tokens=1, trace=True)
        assert step.token == case["new_ids"][0]
        # Stored: the norm of the stream before each layer at the last prompt token; tolerance 0.5 %.
        assert step.norms[0, :, -1] == pytest.approx(case["residual_norms_last_token"], rel=5e-3)


def test_what_a_hook_returns_replaces_the_activation(tmp_path):
    """Taps on every activation that a hook can replace, with and without a change; the model itself does not change."""
    model = tiny_model(tmp_path)
    before = model(TOKENS)
    assert mx.array_equal(tapped(model, lambda layer, name, value: value)(TOKENS), before).item()
    for name in ("z", "attn_out", "mlp_out", "resid_pre", "resid_post"):
        changed = tapped(model, lambda layer, name, value: value * 0.5, names=(name,), layers=[1])(TOKENS)
        assert mx.abs(changed - before).max().item() > 1e-3, name
    assert mx.array_equal(model(TOKENS), before).item()
