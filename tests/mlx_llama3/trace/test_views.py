"""Lens, attention, attribution and neurons against full passes in NumPy float64."""

import numpy as np
import pytest
from all_states import all_states
from tiny_models import quantized, random_weights, tiny_args, tiny_model, write_folder

from mlx_llama3.checkpoint import loading
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.errors import UserError
from mlx_llama3.trace.attention import attention_from, attention_pattern
from mlx_llama3.trace.attribution import attribute, promoted
from mlx_llama3.trace.lens import logit_lens
from mlx_llama3.trace.neurons import neurons
from mlx_llama3.trace.position import look

import mlx.core as mx

IDS = [3, 14, 159, 26, 5, 35, 89, 79]


@pytest.fixture(scope="module", params=["untied", "tied", "quantized"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    if request.param != "quantized":
        return tiny_model(folder, tiny_args(tie_word_embeddings=request.param == "tied"))
    args = tiny_args(tie_word_embeddings=True)
    write_folder(folder, args, quantized(random_weights(args), bits=8), quantization={"bits": 8, "group_size": 32})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_fits_expanded", lambda *_: False)  # quantized matrix products, as on a GPU
        return load_model(folder)


@pytest.mark.parametrize("index", [0, 4, -1])
@pytest.mark.parametrize("cached", [False, True])
def test_a_position_equals_that_of_a_full_pass(model, index, cached):
    cache = None
    if cached:
        cache = model.make_cache()
        model(mx.array([IDS]), 0, cache)
    position, expected = look(model, IDS, index, cache=cache), all_states(model, IDS)
    for name, states in position.states.items():
        np.testing.assert_allclose(np.array(states), expected[name][:, index], atol=2e-5, err_msg=name)
    np.testing.assert_allclose(np.array(position.logits), np.array(model(mx.array([IDS]))[0, index]), atol=2e-5)
    if cached:  # the cache is unchanged and can be continued
        assert cache[0].offset == len(IDS)
        again = model(mx.array([[7]]), len(IDS), cache)
        assert mx.abs(again - model(mx.array([[*IDS, 7]]))[:, -1:]).max().item() < 2e-5


def test_no_such_position(model):
    for index in (8, -9):
        with pytest.raises(UserError, match=f"position {index}"):
            look(model, IDS, index)


def test_lens(model):
    position = look(model, IDS, 5)
    lens = logit_lens(position, 42, k=4)
    assert lens.ids.shape == (3, 2, 4)
    for layer in range(3):
        for after, name in enumerate(("resid_mid", "resid_post")):
            logits = np.array(model.head(position.states[name][layer]), dtype=np.float64)
            logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            order = np.argsort(-logprobs)
            assert lens.ids[layer, after].tolist() == order[:4].tolist()
            np.testing.assert_allclose(lens.logprobs[layer, after], logprobs[order[:4]], atol=1e-4)
            assert lens.rank[layer, after] == order.tolist().index(42)
            assert lens.target_logprob[layer, after] == pytest.approx(logprobs[42], abs=1e-4)
            assert lens.entropy[layer, after] == pytest.approx(-(np.exp(logprobs) * logprobs).sum(), abs=1e-4)
    # The last layer's lens is the model's own prediction.
    own = np.array(model(mx.array([IDS]))[0, 5])
    assert lens.ids[-1, 1, 0] == own.argmax()


@pytest.mark.parametrize("layer", [0, 2])
def test_attention(model, layer):
    states = all_states(model, IDS)
    pattern = attention_pattern(model, mx.array(states["resid_pre"][layer]), layer)
    assert pattern.shape == (4, 8, 8)
    np.testing.assert_allclose(pattern.sum(-1), 1, atol=1e-5)
    assert (np.triu(pattern, 1) == 0).all()
    # The weighted sum of the values, times wo, is what the layer added.
    attention = model.layers[layer].attention
    x = model.layers[layer].attention_norm(mx.array(states["resid_pre"][layer]))
    values = np.array(attention.wqkv(x)[2]).reshape(8, 2, 16)  # (T, n_kv_heads, head_dim)
    heads = [pattern[head] @ values[:, head // 2] for head in range(4)]
    z = np.concatenate(heads, axis=-1)
    np.testing.assert_allclose(np.array(attention.wo(mx.array(z))), states["attn_out"][layer], atol=2e-5)
    for index in (0, 3, 7):
        row = attention_from(look(model, IDS, index), layer)
        np.testing.assert_allclose(row, pattern[:, index, : index + 1], atol=1e-5)


@pytest.mark.parametrize("token", [0, 42, 319])
def test_attribution_sums_to_the_logit(model, token):
    position = look(model, IDS, -1)
    parts = attribute(position, token)
    assert parts.logit == pytest.approx(model(mx.array([IDS]))[0, -1, token].item(), abs=1e-4)
    assert parts.embedding + parts.attention.sum() + parts.mlp.sum() == pytest.approx(parts.logit, abs=1e-4)
    np.testing.assert_allclose(parts.heads.sum(-1), parts.attention, atol=1e-4)
    assert np.abs(parts.heads).max() > 1e-3


@pytest.mark.parametrize("branch", ["attn_out", "mlp_out"])
def test_promoted_agrees_with_attribution(model, branch):
    position = look(model, IDS, -1)
    ids, values = promoted(position, 1, branch, k=3)
    for token, value in zip(ids.tolist(), values.tolist(), strict=True):
        parts = attribute(position, token)
        assert value == pytest.approx((parts.attention if branch == "attn_out" else parts.mlp)[1], abs=1e-4)
    assert values[0] == values.max() and values[3] == values.min()


def test_neurons(model):
    position = look(model, IDS, 2)
    result = neurons(position, 1, k=5)
    block = model.layers[1]
    np.testing.assert_allclose(
        np.array(block.feed_forward.w2(mx.array(result.values_all))), np.array(position.states["mlp_out"][1]), atol=2e-5
    )
    assert 0.2 < result.active < 0.8
    np.testing.assert_array_equal(result.values, result.values_all[result.ids])
    assert (np.diff(np.abs(result.values)) <= 0).all()
    assert np.abs(result.values_all).max() == np.abs(result.values[0])
