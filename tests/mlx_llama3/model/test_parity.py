"""Conversion and inference against stored values of Meta's own code, for official folders and for the demo model.

`tests/data/README.md` says how the values were made (float32, CPU).
"""

import json
from pathlib import Path

import pytest

from app.cli import main
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.tokenizer.tokenizer import load_tokenizer

import mlx.core as mx

DATA = Path(__file__).parents[2] / "data"
OFFICIAL = ["llama3-1shard", "llama31-2shards", "llama31-long"]
TOLERANCE = 2e-4


class Recorder:
    """Replaces a module of the model and stores its outputs."""

    def __init__(self, module):
        self.module, self.outputs = module, []

    def __call__(self, *args):
        self.outputs.append(self.module(*args))
        return self.outputs[-1]


def record(model) -> dict[str, Recorder]:
    """Recorders of the embedding, each block and each branch, by their names in `expected.safetensors`."""
    model.tok_embeddings = Recorder(model.tok_embeddings)
    recorders = {"act.tok_embeddings": model.tok_embeddings}
    for i, block in enumerate(model.layers):
        for branch in ("attention", "feed_forward"):
            recorders[f"act.layers.{i}.{branch}"] = recorder = Recorder(getattr(block, branch))
            setattr(block, branch, recorder)
        recorders[f"act.layers.{i}"] = model.layers[i] = Recorder(block)
    return recorders


@pytest.fixture(scope="module", params=OFFICIAL)
def golden(request, tmp_path_factory):
    """(folder of the model converted by the command line, Meta's values for it)"""
    source, target = DATA / request.param, tmp_path_factory.mktemp("golden") / request.param
    assert main(["convert", str(source), str(target), "--dtype", "float32"]) == 0
    return target, mx.load(str(source / "expected.safetensors"))


def error(ours: mx.array, expected: mx.array) -> float:
    assert ours.shape[-2:] == expected.shape[-2:]
    return mx.abs(ours - expected).max().item()


def test_full_pass_and_every_activation(golden):
    folder, expected = golden
    model = load_model(folder, dtype=mx.float32)
    recorders = record(model)
    logits = model(expected["tokens"])
    last = expected["logits"].shape[1]  # the long sequence has values for its last 16 positions
    assert error(logits[:, -last:], expected["logits"]) < TOLERANCE
    names = [name for name in expected if name.startswith("act.")]
    assert sorted(names) == sorted(recorders)
    for name in names:
        assert error(recorders[name].outputs[0][:, -last:], expected[name]) < TOLERANCE, name


def test_incremental(golden):
    folder, expected = golden
    if "logits_incremental" not in expected:
        pytest.skip("no incremental values for the long sequence")
    model, tokens = load_model(folder, dtype=mx.float32), expected["tokens"]
    cache, start, parts = model.make_cache(), 0, []
    for length in [10, 3] + [1] * (tokens.shape[1] - 13):
        parts.append(model(tokens[:, start : start + length], start, cache))
        start += length
    assert error(mx.concatenate(parts, axis=1), expected["logits_incremental"]) < TOLERANCE


def test_long_sequence_in_chunks(tmp_path):
    """3,000 positions under scaled RoPE through the cache, 512 at a time."""
    source = DATA / "llama31-long"
    assert main(["convert", str(source), str(tmp_path / "long"), "--dtype", "float32"]) == 0
    model, expected = load_model(tmp_path / "long", dtype=mx.float32), mx.load(str(source / "expected.safetensors"))
    cache, tokens = model.make_cache(), expected["tokens"]
    for start in range(0, tokens.shape[1], 512):
        logits = model(tokens[:, start : start + 512], start, cache)
    assert error(logits[:, -16:], expected["logits"]) < TOLERANCE


@pytest.fixture(scope="module")
def demo(demo_folder):
    return load_model(demo_folder, dtype=mx.float32), load_tokenizer(demo_folder)


@pytest.mark.parametrize(
    "case", json.loads((DATA / "smollm2-greedy.json").read_text()), ids=lambda c: c["messages"][-1]["content"][:20]
)
def test_demo_model(demo, case):
    from mlx_llama3.generation.stream import generate

    model, tokenizer = demo
    assert tokenizer.render_chat(case["messages"]) == case["prompt_text"]
    ids = tokenizer.encode_chat(case["messages"])
    assert ids == case["prompt_ids"]
    logits = model(mx.array([ids]))[0, -1]
    best = mx.argsort(-logits)[:10].tolist()
    assert best == case["top_ids"]
    assert logits[mx.array(best)].tolist() == pytest.approx(case["top_logits"], abs=2e-2)
    steps = list(generate(model, tokenizer, ids, max_tokens=48, temperature=0.0))
    assert [step.token for step in steps] == case["new_ids"]
    assert "".join(step.text for step in steps) == case["new_text"]
    assert steps[-1].finish_reason == ("stop" if len(case["new_ids"]) < 48 else "length")


def test_demo_model_residual_norms(demo_folder):
    """L2 norm of the stream before each of the 30 layers at the last prompt token, within 0.5 %."""
    model = load_model(demo_folder, dtype=mx.float32)
    for case in json.loads((DATA / "smollm2-greedy.json").read_text()):
        x, norms = model.tok_embeddings(mx.array([case["prompt_ids"]])), []
        freqs = model.rope.frequencies(0, x.shape[1])
        for block in model.layers:
            norms.append(mx.linalg.norm(x[0, -1]).item())
            x = block(x, 0, freqs, "causal")
        assert norms == pytest.approx(case["residual_norms_last_token"], rel=5e-3)
