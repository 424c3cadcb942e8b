"""Perplexity against a plain computation of the same sum, window by window."""

import math

import numpy as np
import pytest
from meta_checkpoint import PARAMS, write_meta, write_tokenizer_model
from tiny_models import tiny_args, tiny_model

from convert.commands import perplexity as perplexity_command
from convert.conversion.to_mlx import convert
from convert.verification.perplexity import perplexity, score
from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.tokenizer import load_tokenizer

import mlx.core as mx

IDS = np.random.default_rng(0).integers(0, 320, 700).tolist()


def losses(model, ids: list[int]) -> np.ndarray:
    """-log p of every token after the first, from one full pass in float64."""
    logits = np.asarray(model(mx.array([ids])))[0].astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return -log_p[np.arange(len(ids) - 1), ids[1:]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), tiny_args(max_seq_len=1024))


def test_one_window_equals_a_full_pass(model):
    """700 tokens go through the cache in three chunks."""
    result, expected = score(model, IDS, context=1000, stride=500), losses(model, IDS)
    assert result.tokens == 699 and result.windows == 1
    assert result.nll == pytest.approx(expected.mean(), abs=1e-5)
    assert result.error == pytest.approx(expected.std() / math.sqrt(699), rel=1e-3)
    assert result.value == pytest.approx(math.exp(expected.mean()), rel=1e-5)


@pytest.mark.parametrize("context, stride", [(100, 100), (100, 50), (100, 7), (300, 299), (2, 1)])
def test_windows_score_every_token_once_with_the_context_before_it(model, context, stride):
    ids = IDS[:307]
    expected, scored = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        if end - begin > 1:
            window = losses(model, ids[begin:end])
            expected += list(window[-(end - scored) :])
        scored = end
        if end == len(ids):
            break
    result = score(model, ids, context=context, stride=stride)
    # Without overlap, the first token of each window has nothing before it.
    assert result.tokens == len(expected) == (306 if stride < context else 306 - 306 // context)
    assert result.nll == pytest.approx(np.mean(expected), abs=1e-5)


def test_bos_token_precedes_each_window(model):
    result = score(model, IDS[:90], first=[5], context=30, stride=30)
    expected = np.concatenate([losses(model, [5, *IDS[at : at + 30]]) for at in (0, 30, 60)])
    assert result.tokens == 90 and result.nll == pytest.approx(expected.mean(), abs=1e-5)


def test_a_uniform_model_has_its_vocabulary_as_perplexity(model):
    class Uniform:
        make_cache = staticmethod(lambda: None)
        __call__ = staticmethod(lambda tokens, start_pos, cache: mx.zeros((*tokens.shape, 320)))

    result = score(Uniform(), IDS, context=64, stride=32)
    assert result.value == pytest.approx(320, rel=1e-4) and result.error < 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a byte tokenizer and a BOS token of its own."""
    work = tmp_path_factory.mktemp("folder")
    write_tokenizer_model(write_meta(work / "in", params=PARAMS | {"vocab_size": 556}) / "tokenizer.model", 300)
    convert(work / "in", work / "out", dtype="float32", progress=False)
    return work / "out"


def test_folder_and_text(folder, tmp_path, capsys):
    (tmp_path / "text").write_text("So shaken as we are, so wan with care" * 5)
    args = perplexity_command.argparse.ArgumentParser()
    perplexity_command.add_arguments(args)
    parsed = args.parse_args([str(folder), "--text", str(tmp_path / "text"), "--context", "50", "--stride", "20"])
    assert perplexity_command.run(parsed) == 0
    result = perplexity(folder, text=(tmp_path / "text").read_text(), context=50, stride=20, progress=False)
    assert result.tokens == len(load_tokenizer(folder).encode((tmp_path / "text").read_text()))
    assert capsys.readouterr().out == f"{result}\n" and str(result).startswith(f"perplexity {result.value:.4f} +- ")


def test_built_in_text(folder):
    assert 100 < perplexity(folder, progress=False).value < 10_000


@pytest.mark.parametrize(
    "options, named",
    [
        ({"text": "a"}, "the text has 1 tokens"),
        ({"context": 1}, "--context 1: from 2 to 8191"),
        ({"context": 8192}, "--context 8192: from 2 to 8191"),
        ({"context": 10, "stride": 11}, "--stride 11: from 1 to the context, 10"),
        ({"context": 10, "stride": 0}, "--stride 0"),
    ],
)
def test_what_makes_no_sense(folder, options, named):
    with pytest.raises(UserError, match=named):
        perplexity(folder, **options, progress=False)
