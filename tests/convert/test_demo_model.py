"""The demo model, converted from its GGUF and from a Hugging Face export of that, generates the same tokens."""

from pathlib import Path

import pytest

from convert.conversion.to_mlx import convert
from convert.sources.huggingface import open_huggingface
from convert.sources.open import open_source
from convert.verification.compare import compare
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.tokenizer.tokenizer import load_tokenizer

import mlx.core as mx

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def greedy(folder: Path, count: int = 8) -> list[int]:
    model, tokenizer = load_model(folder, dtype=mx.float32), load_tokenizer(folder)
    cache, tokens, start, generated = model.make_cache(), mx.array([tokenizer.encode_chat(MESSAGES)]), 0, []
    for _ in range(count):
        logits = model(tokens, start_pos=start, cache=cache)
        start += tokens.shape[1]
        tokens = mx.argmax(logits[:, -1:], axis=-1)
        generated.append(tokens.item())
    return generated


@pytest.fixture(scope="module")
def folders(demo_gguf, tmp_path_factory) -> dict[str, Path]:
    """GGUF -> packed folder; GGUF -> 16-bit folder, as the hub would have it; that one converted again."""
    work = tmp_path_factory.mktemp("demo")
    convert(demo_gguf, work / "packed", progress=False)
    convert(demo_gguf, work / "export", dequantize=True, progress=False)
    convert(work / "export", work / "again", progress=False)
    return {path.name: path for path in work.iterdir()}


def test_same_tokens(folders):
    tokens = {name: greedy(folder) for name, folder in folders.items()}
    assert tokens["packed"] == tokens["export"] == tokens["again"]
    assert "Paris" in load_tokenizer(folders["packed"]).decode(tokens["packed"])


def test_packed_matrices_hold_the_ggufs_values_exactly(folders, demo_gguf):
    """Q4_1 and Q8_0 map to MLX's affine packing without loss; norms are cast to float16."""
    comparisons = list(compare(open_huggingface(folders["packed"]), open_source(demo_gguf)))
    assert len(comparisons) == 272 and all(comparison.exact for comparison in comparisons)
    assert sum("4-bit" in c.packing for c in comparisons) == 210


def test_tokenizer_files_are_carried_on(folders):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folders["again"] / name).read_bytes() == (folders["packed"] / name).read_bytes()
