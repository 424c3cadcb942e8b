"""The GGUF files that we write, run by llama.cpp (llama-cpp-python)."""

import json
from pathlib import Path

import llama_cpp_record
import numpy as np
import pytest

from convert.conversion.to_gguf import to_gguf

import mlx.core as mx

pytestmark = pytest.mark.peers
F32 = 0  # ggml_type of the key and value cache


def load(path: Path, **options):
    from llama_cpp import Llama

    return Llama(str(path), verbose=False, n_threads=2, type_k=F32, type_v=F32, flash_attn=False, **options)


def logits(path: Path, tokens: list[int]) -> np.ndarray:
    """The logits of every position: (tokens, vocab_size) float32."""
    model = load(path, n_ctx=len(tokens) + 8, n_batch=len(tokens), n_ubatch=len(tokens), logits_all=True)
    model.eval(tokens)
    return model.scores[: len(tokens)].copy()


@pytest.mark.parametrize("name", ["llama3-1shard", "llama31-2shards", "llama31-long"])
def test_logits_are_those_of_metas_reference(tmp_path, name):
    """llama.cpp's float16 weights and activations are off by 4e-3; without RoPE scaling the long one is by 2."""
    expected = mx.load(str(llama_cpp_record.DATA / name / "expected.safetensors"))
    path = tmp_path / "model.gguf"
    llama_cpp_record.write(name, path)
    assert llama_cpp_record.digest(path) == llama_cpp_record.RECORD["sha256"][name]
    for tokens, reference in zip(expected["tokens"].tolist(), np.array(expected["logits"]), strict=True):
        actual = logits(path, tokens)[-len(reference) :]
        np.testing.assert_allclose(actual, reference, atol=2e-2)


@pytest.mark.parametrize("type_name", ["F16", "Q8_0", "Q4_1"])
def test_demo_goes_through_gguf(tmp_path, demo_gguf, demo_folder, type_name):
    """The demo written to GGUF again from the converted folder: equal token ids, and in Q4_1 bit-identical logits."""
    path = tmp_path / "demo.gguf"
    to_gguf(demo_folder, path, type_name=type_name, progress=False)
    record = json.loads((llama_cpp_record.DATA / "smollm2-greedy.json").read_text())[2]  # clear answers
    model, original = load(path, n_ctx=512), load(demo_gguf, n_ctx=512)
    for text in (
        "it's 12345 o'clock!\n\n  indent\ttab",
        "日本語 и русский \U0001f600",
        "<|im_start|>user",
        "  a   b\n\n\n",
    ):
        for special in (False, True):
            assert model.tokenize(text.encode(), False, special) == original.tokenize(text.encode(), False, special)
    assert model.metadata["tokenizer.chat_template"] == original.metadata["tokenizer.chat_template"]
    assert (model.token_bos(), model.token_eos()) == (original.token_bos(), original.token_eos())
    actual, expected = (logits(file, record["prompt_ids"])[-1] for file in (path, demo_gguf))
    if type_name == "Q4_1":
        np.testing.assert_array_equal(actual, expected)
    assert np.argmax(actual) == record["top_ids"][0]
