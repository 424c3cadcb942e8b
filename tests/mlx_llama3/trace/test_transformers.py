"""States, norms and attention patterns against transformers' hidden states and attentions (float32, 1e-3 relative).

`tests/data/README.md` describes how the values were computed.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.model.hooks.norms import POINTS, NormCapture
from mlx_llama3.trace.attention import attention_from
from mlx_llama3.trace.position import look

import mlx.core as mx

DATA = Path(__file__).parents[2] / "data"
STATES = ("resid_pre", "attn_out", "mlp_out", "resid_post")


def assert_close(ours: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Within 1e-3 of the largest value of the row."""
    assert ours.shape == expected.shape, what
    error = np.abs(ours - expected).max(-1) / np.abs(expected).max(-1)
    assert error.max() < 1e-3, f"{what}: {error.max()}"


@pytest.mark.parametrize("name", ["gqa2", "tied-rope32", "gqa8-head-dim"])
def test_tiny_random_models(name):
    expected = {
        k.split("/")[1]: v
        for k, v in load_file(DATA / "transformers" / "trace.safetensors").items()
        if k.startswith(f"{name}/")
    }
    model = load_model(DATA / "transformers" / name, dtype=mx.float32)
    ids = expected["tokens"].tolist()
    for place in range(4):  # the last four positions
        position = look(model, ids, place - 4)
        for state in STATES:
            assert_close(np.array(position.states[state]), expected[state][:, place], f"{state} at {place}")
        for layer, pattern in enumerate(expected["attention"][:, :, place]):
            ours = attention_from(position, layer)
            assert_close(ours, pattern[:, : ours.shape[1]], f"attention {layer} at {place}")


def test_demo_model(demo_folder):
    expected = load_file(DATA / "smollm2-trace.safetensors")
    model, ids = load_model(demo_folder, dtype=mx.float32), expected["tokens"].tolist()
    capture = NormCapture(model)
    mx.eval(capture.model(mx.array([ids])))
    norms = capture.read(capture.take())
    for state in STATES:
        np.testing.assert_allclose(norms[POINTS.index(state)], expected[f"norm/{state}"], rtol=1e-3, err_msg=state)
    position = look(model, ids, -1)
    for state in STATES:
        assert_close(np.array(position.states[state]), expected[f"last/{state}"], state)
    for layer in (0, 14, 29):
        assert_close(attention_from(position, layer), expected["attention"][layer], f"attention {layer}")
