"""Recorded blocks against the blocks themselves: the same logits, norms and caches, and no recording of a tap."""

import shutil
from functools import partial

import numpy as np
import pytest
from tiny_models import tiny_model

from mlx_llama3.model.compiled import CompiledBlock
from mlx_llama3.model.hooks.edits import Scale, edited
from mlx_llama3.model.hooks.norms import NormCapture
from mlx_llama3.model.hooks.taps import tapped
from mlx_llama3.model.layers import tiled_linear as cpu

import mlx.core as mx

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="mx.compile needs a compiler on the CPU")

IDS = [3, 14, 159, 26, 5]


@pytest.fixture
def model(tmp_path, monkeypatch):
    """With MLX's own layers and its fused rotation, as on a GPU."""
    monkeypatch.setattr(cpu, "expand", lambda model, dtype: None)
    model = tiny_model(tmp_path)
    model.rope.frequencies = partial(model.rope.frequencies, table=False)
    return model


def decoded(model, runner=None):
    """Logits of each position, fed one at a time."""
    runner, cache = runner or model, model.make_cache()
    return np.stack([np.array(runner(mx.array([[token]]), i, cache)[0, -1]) for i, token in enumerate(IDS)])


def test_same_logits_and_norms(model):
    expected, watched = decoded(model), NormCapture(model)
    decoded(model, watched.model)
    norms = watched.read(watched.take())
    model.compiles = True
    np.testing.assert_allclose(decoded(model), expected, atol=1e-5)
    assert all(isinstance(block, CompiledBlock) for block in model.compiled_blocks.of(model.layers))
    capture = NormCapture(model)
    np.testing.assert_allclose(decoded(model, capture.model), expected, atol=1e-5)
    np.testing.assert_allclose(capture.read(capture.take()), norms, rtol=1e-5)


def test_taps_and_edits_are_run_not_recorded(model):
    expected = decoded(edited(model, [Scale(1, "mlp", 0.5)]))
    model.compiles, seen = True, []
    np.testing.assert_allclose(decoded(edited(model, [Scale(1, "mlp", 0.5)])), expected, atol=1e-5)

    def keep(layer, name, value):
        seen.append((layer, name))
        return value

    decoded(tapped(model, keep, names=("attn_out", "resid_mid")))
    assert len(seen) == 2 * len(model.layers) * len(IDS)


def test_use_forgets_recordings(model):
    model.compiles = True
    decoded(model)
    model.layers[0].feed_forward.w2.weight *= 0
    model.use(model.kernels)
    after = decoded(model)
    model.compiles = False
    np.testing.assert_allclose(after, decoded(model), atol=1e-5)
