"""Adapters on the embedding and the head give what PEFT and mlx-lm run: tied, untied, or with another vocabulary."""

import json

import pytest
from tiny_adapters import mlx_adapter, peft_folder
from tiny_models import quantized, random_weights, tiny_args, write_folder

from convert.conversion.to_mlx import convert
from convert.verification.verify import verify
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.errors import UserError

import mlx.core as mx

ARGS = tiny_args(tie_word_embeddings=True)
WEIGHTS = random_weights(ARGS)
TABLE = WEIGHTS["model.embed_tokens.weight"]
PREFIX = "base_model.model."
EMBEDDING, HEAD = f"{PREFIX}model.embed_tokens", f"{PREFIX}lm_head"


def low_rank(rows: int = 320, *, seed: int = 0) -> tuple[mx.array, mx.array]:
    """A (4, 64) and B (rows, 4) of an update of a matrix with a row per token."""
    keys = mx.random.split(mx.random.key(seed))
    return mx.random.normal((4, 64), key=keys[0]) * 0.2, mx.random.normal((rows, 4), key=keys[1]) * 0.2


A, B = low_rank()
NEW = TABLE + 2 * (B @ A)  # lora_alpha is twice the rank
ON_EMBEDDING = {f"{EMBEDDING}.lora_embedding_A": B.T, f"{EMBEDDING}.lora_embedding_B": A.T}
ON_HEAD = {f"{HEAD}.lora_A.weight": A, f"{HEAD}.lora_B.weight": B}
TYING = {"ensure_weight_tying": True}


def whole(module: str, array: mx.array) -> dict[str, mx.array]:
    return {f"{module}.weight": array}


# Stored tensors, settings, and the embedding and head (None: tied) that PEFT then runs.
CASES = {
    "embedding": (ON_EMBEDDING, {}, NEW, TABLE),
    "whole embedding": (whole(EMBEDDING, NEW), {}, NEW, TABLE),
    "modules_to_save": ({f"{EMBEDDING}.modules_to_save.default.weight": NEW}, {}, NEW, TABLE),
    "base layer too": (ON_EMBEDDING | {f"{EMBEDDING}.base_layer.weight": TABLE}, {}, NEW, TABLE),
    "embedding, and the head as it was": (ON_EMBEDDING | whole(HEAD, TABLE), {}, NEW, TABLE),
    "head": (ON_HEAD, {}, TABLE, NEW),
    "whole head": (whole(HEAD, NEW), {}, TABLE, NEW),
    "both, different": (whole(EMBEDDING, NEW) | whole(HEAD, TABLE + 1), {}, NEW, TABLE + 1),
    "both, equal": (whole(EMBEDDING, NEW) | whole(HEAD, NEW + 0), {}, NEW, None),
    "equal updates": (ON_EMBEDDING | ON_HEAD, {}, NEW, None),
    "updates of other sizes": (
        ON_EMBEDDING | ON_HEAD | {f"{HEAD}.lora_B.weight": B * 2},
        {},
        NEW,
        TABLE + 4 * (B @ A),
    ),
    "tied by PEFT": (ON_EMBEDDING, TYING, NEW, None),
    "tied by PEFT, both saved": (whole(EMBEDDING, NEW) | whole(HEAD, NEW + 0), TYING, NEW, None),
}


@pytest.mark.parametrize("stored, settings, embedding, head", CASES.values(), ids=CASES)
@pytest.mark.parametrize("block", [1 << 24, 64 * 7])
def test_tied_model(tmp_path, monkeypatch, stored, settings, embedding, head, block):
    monkeypatch.setattr("convert.lora.tied_head._BLOCK_ELEMENTS", block)
    folder, adapter = write_folder(tmp_path / "base", ARGS, WEIGHTS), peft_folder(tmp_path, stored, **settings)
    report = convert(folder, tmp_path / "out", adapter=adapter, progress=False)
    out = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert mx.abs(out["model.embed_tokens.weight"] - embedding).max().item() < 1e-5
    assert any("the head is stored by itself" in note for note in report.notes) == (head is not None)
    if head is None:
        assert "lm_head.weight" not in out
    else:
        assert mx.abs(out["lm_head.weight"] - head).max().item() < 1e-5
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == (head is None)
    expected = WEIGHTS | {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding if head is None else head}
    ids = mx.array([[5, 17, 200, 3]])
    write_folder(tmp_path / "expected", tiny_args(), expected)
    difference = load_model(tmp_path / "out")(ids) - load_model(tmp_path / "expected")(ids)
    assert mx.abs(difference).max().item() < 1e-4
    assert verify(tmp_path / "out", folder, adapter=adapter, progress=False).ok


def test_packed_tied_model(tmp_path):
    """The head keeps the embedding's packing, word for word."""
    packing = {"bits": 4, "group_size": 32}
    folder = write_folder(tmp_path / "base", ARGS, quantized(WEIGHTS, **packing), quantization=packing)
    convert(folder, tmp_path / "out", adapter=peft_folder(tmp_path, ON_EMBEDDING), progress=False)
    before, after = (mx.load(str(path / "model.safetensors")) for path in (folder, tmp_path / "out"))
    for part in ("weight", "scales", "biases"):
        assert mx.array_equal(after[f"lm_head.{part}"], before[f"model.embed_tokens.{part}"]).item()
    load_model(tmp_path / "out")


def test_mlx_lms_own_fusion_of_a_tied_model(tmp_path):
    """mlx-lm's update of the embedding changes the tied head too."""
    folder = write_folder(tmp_path / "base", ARGS, WEIGHTS)
    expected = mlx_adapter(folder, tmp_path / "adapter", keys=["model.embed_tokens"])
    convert(folder, tmp_path / "out", adapter=tmp_path / "adapter", progress=False)
    out = mx.load(str(tmp_path / "out" / "model.safetensors"))
    name = "model.embed_tokens.weight"
    assert out.keys() == WEIGHTS.keys() and mx.abs(expected[name] - TABLE).max().item() > 1e-3
    assert mx.abs(out[name] - expected[name]).max().item() < 1e-5


def table(rows: int) -> mx.array:
    return mx.random.normal((rows, 64), key=mx.random.key(rows)) * 0.1


@pytest.mark.parametrize("rows", [331, 300])
@pytest.mark.parametrize("tied", [True, False])
def test_another_vocabulary(tmp_path, tied, rows):
    """Taken, if the adapter brings all that has a row per token."""
    args = tiny_args(tie_word_embeddings=tied)
    folder = write_folder(tmp_path / "base", args, random_weights(args))
    embedding, head = table(rows), table(rows) + 0 if tied else table(rows) * 2
    adapter = peft_folder(tmp_path, whole(EMBEDDING, embedding) | whole(HEAD, head))
    report = convert(folder, tmp_path / "out", adapter=adapter, progress=False)
    out = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert mx.array_equal(out["model.embed_tokens.weight"], embedding).item()
    assert tied or mx.array_equal(out["lm_head.weight"], head).item()
    assert f"the vocabulary is the adapter's: {rows} instead of 320" in report.notes
    model = load_model(tmp_path / "out")
    assert model(mx.array([[rows - 1]])).shape == (1, 1, rows) and ("lm_head.weight" in out) != tied
    assert verify(tmp_path / "out", folder, adapter=adapter, progress=False).ok


INCOMPLETE = {
    "no rows for new tokens": (
        {f"{EMBEDDING}.lora_embedding_A": mx.ones((4, 331)), f"{EMBEDDING}.lora_embedding_B": mx.ones((64, 4))},
        "the whole model.embed_tokens and lm_head",
    ),
    "no head": (whole(EMBEDDING, table(331)), "the whole lm_head"),
    "a head of the old size": (whole(EMBEDDING, table(331)) | whole(HEAD, table(320)), "the whole lm_head"),
}


@pytest.mark.parametrize("stored, missing", INCOMPLETE.values(), ids=INCOMPLETE)
def test_another_vocabulary_without_all_of_its_rows(tmp_path, stored, missing):
    folder = write_folder(tmp_path / "base", ARGS, WEIGHTS)
    with pytest.raises(UserError, match="trained with a vocabulary of 331 tokens, the model has 320") as error:
        convert(folder, tmp_path / "out", adapter=peft_folder(tmp_path, stored), progress=False)
    assert missing in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_table_of_another_width(tmp_path):
    folder = write_folder(tmp_path / "base", ARGS, WEIGHTS)
    stored = whole(EMBEDDING, mx.ones((331, 48))) | whole(HEAD, mx.ones((331, 48)))
    with pytest.raises(UserError, match="it belongs to another model"):
        convert(folder, tmp_path / "out", adapter=peft_folder(tmp_path, stored), progress=False)


def test_head_of_a_tied_model_by_mlx_lm(tmp_path):
    """mlx-lm has no head there, so it would run without that update."""
    folder, adapter = write_folder(tmp_path / "base", ARGS, WEIGHTS), tmp_path / "adapter"
    adapter.mkdir()
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {"lm_head.lora_a": A.T, "lm_head.lora_b": B.T})
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 1.0}}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="which the model does not have; the head is tied to the embedding"):
        convert(folder, tmp_path / "out", adapter=adapter, progress=False)
