"""`trace.run` against plain generation and against one full pass over the finished sequence."""

import numpy as np
import pytest
from all_states import all_states
from tiny_models import tiny_args, tiny_model

import mlx_llama3.trace
from mlx_llama3.errors import UserError
from mlx_llama3.generation.stream import generate
from mlx_llama3.model.hooks.edits import Scale, edited
from mlx_llama3.model.hooks.norms import POINTS
from mlx_llama3.trace import running
from mlx_llama3.trace.attention import attention_pattern
from mlx_llama3.trace.store import load_trace

import mlx.core as mx

IDS = [3, 14, 159, 26, 5]
ALL = running.SAVE


@pytest.fixture
def model(tmp_path):
    return tiny_model(tmp_path)


@pytest.mark.parametrize("chunk", [3, 512])
def test_all_states_equal_those_of_a_full_pass(model, tokenizer, chunk):
    trace = mlx_llama3.trace.run(model, tokenizer, IDS, max_tokens=6, save=ALL, prefill_chunk=chunk, name="tiny")
    tokens = trace.tokens.tolist()
    assert tokens == IDS + [step.token for step in generate(model, tokenizer, IDS, max_tokens=6)]
    assert (trace.model, trace.tokens.dtype, len(trace.pieces)) == ("tiny", np.int32, 11)
    assert trace.settings == {"prompt_tokens": 5, "max_tokens": 6, "finish_reason": "length"}
    expected = all_states(model, tokens)
    for point in POINTS:
        np.testing.assert_allclose(trace.norm(point), np.linalg.norm(expected[point], axis=-1), rtol=1e-4)
    np.testing.assert_allclose(trace.extra["resid_post"], expected["resid_post"], atol=2e-5)
    np.testing.assert_allclose(trace.extra["logits"], np.array(model(mx.array([tokens]))[0]), atol=1e-4)
    for layer in range(3):
        pattern = attention_pattern(model, mx.array(expected["resid_pre"][layer]), layer)
        np.testing.assert_allclose(trace.extra[f"attention/{layer}"], pattern, atol=1e-5)
    assert {array.dtype for array in trace.extra.values()} == {np.dtype(np.float32)}
    assert len(trace.extra) == 5


def test_a_stop_token_is_traced_too(model, tokenizer):
    first = next(generate(model, tokenizer, IDS, max_tokens=1)).token
    stopping = load_stopping(tokenizer, first)
    trace = running.run(model, stopping, IDS, max_tokens=6)
    assert trace.tokens.tolist() == [*IDS, first]
    assert trace.settings["finish_reason"] == "stop"
    expected = all_states(model, [*IDS, first])
    np.testing.assert_allclose(trace.norm("mlp_out"), np.linalg.norm(expected["mlp_out"], axis=-1), rtol=1e-4)


def load_stopping(tokenizer, token):
    """A copy of the tokenizer for which `token` ends an answer."""
    import copy

    stopping = copy.copy(tokenizer)
    stopping.stop_ids = frozenset({token})
    return stopping


def test_the_prompt_alone(model, tokenizer):
    trace = running.run(model, tokenizer, IDS, max_tokens=0, save=["logits"])
    assert trace.tokens.tolist() == IDS and set(trace.extra) == {"logits"}
    np.testing.assert_allclose(
        trace.norm("resid_post"), np.linalg.norm(all_states(model, IDS)["resid_post"], axis=-1), rtol=1e-4
    )


def test_under_an_edit(model, tokenizer, tmp_path):
    quiet = edited(model, [Scale(1, "mlp")])
    trace = running.run(quiet, tokenizer, IDS, max_tokens=3, save=ALL, stop=["x"], temperature=0.5, seed=1)
    assert (trace.norm("mlp_out")[1] == 0).all() and (trace.norm("mlp_out")[0] > 0).all()
    expected = all_states(quiet, trace.tokens.tolist())
    np.testing.assert_allclose(trace.extra["resid_post"], expected["resid_post"], atol=2e-5)
    trace.save(tmp_path / "t.safetensors")
    again = load_trace(tmp_path / "t.safetensors")
    assert again.settings["stop"] == ["x"] and again.settings["seed"] == 1
    assert again.pieces == trace.pieces
    np.testing.assert_array_equal(again.extra["attention/2"], trace.extra["attention/2"])


def test_on_step_gets_every_step(model, tokenizer):
    steps = []
    trace = running.run(model, tokenizer, IDS, max_tokens=4, on_step=steps.append)
    assert [step.token for step in steps] == trace.tokens[5:].tolist()
    assert trace.extra == {}


def test_memory_is_checked_before_anything_runs(model, tokenizer, monkeypatch):
    monkeypatch.setattr("mlx_llama3.system.memory.available_memory", lambda: 1000)
    monkeypatch.setattr(running, "generate", lambda *a, **k: pytest.fail("it ran"))
    with pytest.raises(UserError, match="a trace of 105 tokens with attention.*GB.*save less"):
        running.run(model, tokenizer, IDS, max_tokens=100, save=["attention"])


def test_a_trace_that_could_not_be_opened_again_is_refused(tmp_path, tokenizer):
    model = tiny_model(tmp_path, tiny_args(max_seq_len=100_000))
    with pytest.raises(UserError, match="more than 8 GB cannot be opened again"):
        running.run(model, tokenizer, IDS, max_tokens=99_000, save=["attention"])


def test_the_estimate_covers_the_saved_arrays(model, tokenizer):
    trace = running.run(model, tokenizer, IDS, max_tokens=20, save=ALL)
    kept = trace.norms.nbytes + sum(array.nbytes for array in trace.extra.values())
    assert kept <= running.estimate(model.args, 25, ALL) <= 3 * kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save": ["weights"]}, "'weights' cannot be saved in a trace; choose of norms, residuals"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_refused(model, tokenizer, options, message):
    with pytest.raises(UserError, match=message):
        running.run(model, tokenizer, IDS, **options)


def test_an_empty_prompt_is_refused(model, tokenizer):
    with pytest.raises(UserError, match="prompt is empty"):
        running.run(model, tokenizer, [], max_tokens=0)
