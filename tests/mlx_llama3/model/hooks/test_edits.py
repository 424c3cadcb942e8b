"""Edits: each has its effect, they compose, edited models can be traced, and the model itself does not change."""

import numpy as np
import pytest
from tiny_models import tiny_model

from mlx_llama3.errors import UserError
from mlx_llama3.model.hooks.edits import Add, Scale, edited
from mlx_llama3.model.hooks.norms import NormCapture
from mlx_llama3.trace.attribution import attribute
from mlx_llama3.trace.position import look

import mlx.core as mx

IDS = [3, 14, 159, 26, 5]
TOKENS = mx.array([IDS])


@pytest.fixture
def model(tmp_path):
    return tiny_model(tmp_path)


def test_no_edit_changes_nothing(model):
    assert mx.array_equal(edited(model, [])(TOKENS), model(TOKENS)).item()
    assert mx.array_equal(edited(model, [Scale(1, "mlp", 1.0)])(TOKENS), model(TOKENS)).item()


@pytest.mark.parametrize("branch", ["attention", "mlp"])
def test_a_silenced_branch_is_a_layer_without_it(model, branch):
    before = model(TOKENS)
    x = model.tok_embeddings(TOKENS)
    freqs = model.rope.frequencies(0, 5)
    for layer, block in enumerate(model.layers):
        attn = block.attention(block.attention_norm(x), 0, freqs, "causal")
        x = x if (layer, branch) == (1, "attention") else x + attn
        x = x if (layer, branch) == (1, "mlp") else x + block.feed_forward(block.ffn_norm(x))
    expected = model.head(x)
    assert mx.abs(edited(model, [Scale(1, branch)])(TOKENS) - expected).max().item() < 1e-5
    assert mx.abs(expected - before).max().item() > 1e-2
    assert mx.array_equal(model(TOKENS), before).item()


def test_a_silenced_head_takes_its_share_from_the_last_layer(model):
    """With the last MLP silenced, nothing reads a head of the last layer but the logits: they lose what it added."""
    silent = edited(model, [Scale(2, "mlp")])
    position = look(silent, IDS, -1)
    token, head = 7, 3
    share = attribute(position, token).heads[2, head]
    without = look(edited(model, [Scale(2, "mlp"), Scale(2, "head", head=head)]), IDS, -1)
    scale = [np.sqrt((np.array(p.states["resid_post"][-1]) ** 2).mean() + 1e-5) for p in (position, without)]
    # Logits times the norm's scale are a linear function of the stream.
    lost = position.logits[token].item() * scale[0] - without.logits[token].item() * scale[1]
    assert lost == pytest.approx(share * scale[0], abs=1e-4)
    assert all(attribute(without, token).heads[2, head] == 0 for token in (0, 7))


def test_half_and_twice_and_order(model):
    both = edited(model, [Scale(0, "mlp", 0.5), Scale(0, "mlp", 2.0)])
    assert mx.abs(both(TOKENS) - model(TOKENS)).max().item() < 1e-5


def test_an_added_vector_is_in_the_stream(model):
    vector = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    steered = edited(model, [Add(1, vector, 3.0)])
    before, after = look(model, IDS, -1), look(steered, IDS, -1)
    np.testing.assert_allclose(
        np.array(after.states["resid_pre"][2]), np.array(before.states["resid_post"][1]) + 3 * vector, atol=1e-4
    )


def test_an_edited_model_can_be_traced(model):
    quiet = edited(model, [Scale(1, "mlp"), Scale(0, "attention", 2.0), Add(0, np.ones(64, np.float32))])
    capture = NormCapture(quiet)
    logits = capture.model(TOKENS)
    assert mx.array_equal(logits, quiet(TOKENS)).item()
    norms = capture.read(capture.take())
    assert (norms[3, 1] == 0).all() and (norms[3, 0] > 0).all()
    plain = NormCapture(model)
    mx.eval(plain.model(TOKENS))
    np.testing.assert_allclose(norms[1, 0], 2 * plain.read(plain.take())[1, 0], rtol=1e-5)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Scale(3, "mlp"), "layer 3: this model has layers 0 to 2"),
        (Scale(-1, "mlp"), "layer -1"),
        (Scale(0, "norm"), "branch 'norm'"),
        (Scale(0, "head"), "head None"),
        (Scale(0, "head", head=4), "head 4: this model has heads 0 to 3"),
        (Scale(0, "mlp", float("nan")), "factor is nan"),
        (Add(0, np.ones(63)), r"shape \(63,\), expected \(64,\)"),
    ],
)
def test_refused(model, edit, message):
    with pytest.raises(UserError, match=message):
        edited(model, [edit])
