"""Compiled blocks give the logits and norms of the blocks themselves, and blocks with a tap are not compiled."""

import shutil
from functools import partial

import numpy as np
import pytest
from tiny_models import tiny_model

from mlx_llama3.model.compiled import CompiledBlock
from mlx_llama3.model.hooks.edits import Scale, edited
from mlx_llama3.model.hooks.norms import NormCapture
from mlx_llama3.model.hooks.taps import tapped
from mlx_llama3.model.layers import tiled_linear

import mlx.core as mx

pytestmark = pytest.mark.skipif(
    mx.default_device() == mx.cpu and shutil.which("g++") is None, reason="mx.compile needs a compiler on the CPU"
)

IDS = [3, 14, 159, 26, 5]


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model with MLX's own layers and its fused RoPE, as on a GPU."""
    monkeypatch.setattr(tiled_linear, "use_tiled_layers", lambda model, dtype: None)
    model = tiny_model(tmp_path)
    model.rope.frequencies = partial(model.rope.frequencies, table=False)
    return model


def decoded(model, run=None):
    """The logits of each position, fed one at a time to `run` (default: the model)."""
    run, cache = run or model, model.make_cache()
    return np.stack([np.array(run(mx.array([[token]]), i, cache)[0, -1]) for i, token in enumerate(IDS)])


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


def test_blocks_with_taps_and_edits_are_not_compiled(model):
    expected = decoded(edited(model, [Scale(1, "mlp", 0.5)]))
    model.compiles, calls = True, []
    np.testing.assert_allclose(decoded(edited(model, [Scale(1, "mlp", 0.5)])), expected, atol=1e-5)

    def hook(layer, name, value):
        calls.append((layer, name))
        return value

    decoded(tapped(model, hook, names=("attn_out", "resid_mid")))
    assert len(calls) == 2 * len(model.layers) * len(IDS)


def test_use_drops_compiled_blocks(model):
    model.compiles = True
    decoded(model)
    model.layers[0].feed_forward.w2.weight *= 0
    model.use(model.kernels)
    after = decoded(model)
    model.compiles = False
    np.testing.assert_allclose(after, decoded(model), atol=1e-5)
