"""The Python programs of the documentation run as printed, and what they print is true.

A program's output stands in its last comments; the numbers behind it are computed here once more, by other means.
"""

import contextlib
import io
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mlx_llama3
from convert.verification.perplexity import score
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# Relative difference of two ways to compute a number: in float32, and in the 16 bits of a GPU.
CLOSE = 1e-3 if mx.default_device() == mx.cpu else 2e-2


def programs(name: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text("utf-8"), re.DOTALL | re.MULTILINE)


def promised(program: str) -> list[str]:
    """The comments at the end of a program: the last lines that it prints."""
    lines = program.splitlines()
    count = next(n for n, line in enumerate(reversed(lines)) if not line.startswith("# "))
    return [line.removeprefix("# ") for line in lines[len(lines) - count :]]


def check_output(program: str, output: str) -> None:
    """Assert the same words, and numbers that differ by rounding at most."""
    expected = promised(program)
    printed = output.splitlines()[-len(expected) :]
    assert expected and [NUMBER.sub("#", line) for line in printed] == [NUMBER.sub("#", line) for line in expected]
    found, wanted = ([float(n) for line in lines for n in NUMBER.findall(line)] for lines in (printed, expected))
    np.testing.assert_allclose(found, wanted, rtol=0.03, atol=0.021)


@pytest.fixture(scope="module")
def session(demo_folder) -> SimpleNamespace:
    """docs/python.md, run from top to bottom: the names that its programs leave, and what each printed."""
    names, outputs = {}, []
    for program in programs("docs/python.md"):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(program, "docs/python.md", "exec"), names)
        outputs.append(output.getvalue())
    return SimpleNamespace(**names, outputs=outputs)


def states(model: Transformer, ids: list[int]) -> list[tuple[mx.array, mx.array, mx.array]]:
    """Of each layer: its updates and its output `(T, dim)`, from calls of the model's own blocks without any hook."""
    x, freqs, found = model.tok_embeddings(mx.array([ids])), model.rope.frequencies(0, len(ids)), []
    for block in model.layers:
        attention = block.attention(block.attention_norm(x), 0, freqs, "causal")
        mlp = block.feed_forward(block.ffn_norm(x + attention))
        x = x + attention + mlp
        found.append((attention[0], mlp[0], x[0]))
    return found


@pytest.fixture(scope="module")
def by_hand(session) -> list[tuple[mx.array, mx.array, mx.array]]:
    return states(session.model, session.ids)


def probabilities(logits: mx.array) -> np.ndarray:
    """Softmax in float64."""
    values = np.array(logits.astype(mx.float32), np.float64)
    exponentials = np.exp(values - values.max())
    return exponentials / exponentials.sum()


def test_the_readmes_program_prints_norms_and_lens(demo_folder, by_hand, session):
    (program,) = programs("README.md")
    # In a process of its own, as a reader would run it, with the imports in its order.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not done.stderr
    check_output(program, done.stdout)
    rows = re.findall(r"layer (\d+): norm (\d+), best ('.*'), rank of ' Paris' (\d+)", done.stdout)
    assert [int(row[0]) for row in rows] == list(range(2, session.model.args.n_layers, 3))
    for layer, norm, best, rank in rows:
        stream = by_hand[int(layer)][2][-1]
        logits = np.array(session.model.head(stream).astype(mx.float32))
        assert int(norm) == pytest.approx(np.linalg.norm(np.array(stream.astype(mx.float32))), rel=CLOSE, abs=0.6)
        assert best == repr(session.tokenizer.decode([int(logits.argmax())]))
        assert int(rank) == pytest.approx((logits > logits[session.paris]).sum(), rel=CLOSE)


@pytest.mark.parametrize("number", range(9))
def test_a_program_prints_what_the_page_says(session, number):
    assert len(session.outputs) == 9
    check_output(programs("docs/python.md")[number], session.outputs[number])


def test_norms_are_those_of_the_blocks(session, by_hand):
    for index, point in enumerate(("attn_out", "mlp_out", "resid_post")):
        wanted = [np.linalg.norm(np.array(layer[index].astype(mx.float32)), axis=-1) for layer in by_hand]
        np.testing.assert_allclose(session.run.norm(point), wanted, rtol=CLOSE)


def test_the_lens_is_the_head_on_the_stream(session, by_hand):
    logits = np.array(session.model.head(mx.stack([layer[2][-1] for layer in by_hand])).astype(mx.float32))
    best = np.take_along_axis(logits, session.lens.ids[:, 1, :1], -1)[:, 0]
    np.testing.assert_allclose(best, logits.max(-1), rtol=CLOSE)
    ranks = (logits > logits[:, session.paris][:, None]).sum(-1)
    np.testing.assert_allclose(session.lens.rank[:, 1], ranks, rtol=CLOSE, atol=1)


def test_the_pattern_is_the_softmax_of_its_queries_and_keys(session, by_hand):
    model, length = session.model, len(session.ids)
    block = model.layers[23]
    queries, kv = block.attention.project(
        block.attention_norm(by_hand[22][2][None]), 0, model.rope.frequencies(0, length)
    )
    key_head = 4 // (model.args.n_heads // model.args.n_kv_heads)
    query, keys = (np.array(each.astype(mx.float32)) for each in (queries[0, 4, -1], kv[0, 0, key_head]))
    wanted = probabilities(mx.array(keys @ query * model.args.head_dim**-0.5))
    np.testing.assert_allclose(session.pattern, wanted, atol=CLOSE)


def test_contributions_add_up_to_the_logit(session, by_hand):
    parts = session.parts
    logit = session.model(mx.array([session.ids]))[0, -1, session.paris].item()
    assert parts.logit == pytest.approx(logit, rel=CLOSE)
    assert parts.embedding + parts.attention.sum() + parts.mlp.sum() == pytest.approx(logit, rel=CLOSE)
    np.testing.assert_allclose(parts.heads.sum(-1), parts.attention, atol=20 * CLOSE)


def test_silencing_a_head_is_a_zero_in_its_part_of_the_output(session, by_hand):
    model, ids = session.model, session.ids
    x, freqs = model.tok_embeddings(mx.array([ids])), model.rope.frequencies(0, len(ids))
    for number, block in enumerate(model.layers):
        q, kv = block.attention.project(block.attention_norm(x), 0, freqs)
        z = mx.fast.scaled_dot_product_attention(q, kv[0], kv[1], scale=block.attention.scale, mask="causal")
        if number == 23:
            z = z * (mx.arange(model.args.n_heads) != 4).astype(z.dtype)[:, None, None]
        x = x + block.attention.join(z)
        x = x + block.feed_forward(block.ffn_norm(x))
    wanted = probabilities(model.head(x[0, -1]))[session.paris]
    found = probabilities(session.quiet(mx.array([ids]))[0, -1])[session.paris]
    assert found == pytest.approx(wanted, rel=5 * CLOSE) and f"{found:.2f}" in session.outputs[5]


def test_steering_adds_the_difference_of_two_states(session):
    model = session.model
    love, hate = (states(model, text)[16][2][-1] for text in session.texts)
    film = session.film.tolist()[0]
    x, freqs = model.tok_embeddings(mx.array([film])), model.rope.frequencies(0, len(film))
    for number, block in enumerate(model.layers):
        x = block(x, 0, freqs, "causal")
        x = x + (love - hate) if number == 16 else x
    logits = model.head(x[0, -1])
    wanted = (logits[session.good] - logits[session.bad]).item()
    printed = float(session.outputs[6].split()[-1])
    assert printed == pytest.approx(wanted, rel=CLOSE, abs=0.051)


def test_the_perplexity_is_that_of_the_command(session):
    length = len(session.text)
    wanted = score(session.model, session.text, context=length, stride=length)
    assert session.chosen.size == wanted.tokens
    assert math.exp(-session.chosen.mean().item()) == pytest.approx(wanted.value, rel=CLOSE)


def test_a_batch_gives_the_answers_of_each_prompt_alone(session):
    for question, prompt in zip(session.questions, session.prompts):
        steps = list(mlx_llama3.generate(session.model, session.tokenizer, prompt, max_tokens=24))
        text = "".join(step.text for step in steps)
        assert f"{question} {text} ({steps[-1].finish_reason})" in session.outputs[8].splitlines()
