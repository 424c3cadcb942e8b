"""Each part of a tokenizer that differs from the source's is found, and the others are not blamed."""

import json
from pathlib import Path

import pytest
from meta_checkpoint import PARAMS, write_meta, write_tokenizer_model

from convert.conversion.to_mlx import convert
from convert.verification.verify import Divergence, Verification, verify


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A Hugging Face folder with a tokenizer and two chat templates."""
    work = tmp_path_factory.mktemp("source")
    params = PARAMS | {"vocab_size": 556}
    write_tokenizer_model(write_meta(work / "meta", params=params) / "tokenizer.model", 300)
    convert(work / "meta", work / "folder", progress=False)
    (work / "folder" / "tokenizer.model").unlink()
    (work / "folder" / "additional_chat_templates").mkdir()
    (work / "folder" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    return work / "folder"


@pytest.fixture
def folder(source, tmp_path) -> Path:
    convert(source, tmp_path / "out", progress=False)
    return tmp_path / "out"


def parts(verification: Verification) -> dict[str, bool | None]:
    return {verdict.part: verdict.ok for verdict in verification.verdicts}


def edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


RIGHT = {"configuration": True, "tensors": True, "tokenizer": True, "chat template": True, "stop ids": True}


def test_a_right_folder_has_a_verdict_for_each_part(folder, source) -> None:
    verification = verify(folder, source, progress=False)
    assert parts(verification) == RIGHT | {"behaviour": True} and verification.ok
    for line in (
        "tokenizer: verified, 556 tokens",
        "chat template: verified, default, tool_use",
        "behaviour: verified",
    ):
        assert f"\n{line}" in str(verification)
    verification = verify(folder, source, run=False, progress=False)
    assert parts(verification) == RIGHT | {"behaviour": None} and verification.ok
    assert "behaviour: not compared, the models were not run" in str(verification)


def swap_tokens(content) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def rename(content) -> None:
    content["added_tokens"][5]["content"] = "<|another|>"


def bare(content) -> None:
    content["post_processor"] = None


@pytest.mark.parametrize(
    ("file", "change", "part", "words"),
    [
        ("tokenizer.json", swap_tokens, "tokenizer", "2 of 556 tokens are others"),
        ("tokenizer.json", rename, "tokenizer", "1 of 556 tokens are others"),
        ("tokenizer.json", bare, "tokenizer", "begins texts with no token, the source with token 300"),
        ("tokenizer_config.json", lambda c: c.update(chat_template="x"), "chat template", "'default' is another one"),
        ("tokenizer_config.json", lambda c: c.pop("chat_template"), "chat template", "'default' is not in the folder"),
        ("generation_config.json", lambda c: c.update(eos_token_id=[7]), "stop ids", "the source's are"),
        ("config.json", lambda c: c.update(eos_token_id=5), "stop ids", "the source's are"),
    ],
)
def test_what_differs_is_named_and_nothing_else(folder, source, file, change, part, words) -> None:
    edit(folder / file, change)
    verification = verify(folder, source, run=False, progress=False)
    assert {name for name, ok in parts(verification).items() if ok is False} == {part}
    assert not verification.ok and f"\n{part}: NOT VERIFIED, " in str(verification) and words in str(verification)


@pytest.mark.parametrize(("perplexity", "ok"), [(22.7, True), (30.0, True), (32.2, False), (float("nan"), False)])
def test_behaviour_is_wrong_if_the_perplexity_rises_by_more_than_a_third(folder, perplexity, ok) -> None:
    divergence = Divergence(512, 22.7, perplexity, 0.3, 0.6)
    verification = Verification(folder, "source", [], [], divergence)
    assert verification.ok == ok and parts(verification)["behaviour"] == ok
    assert f"perplexity {100 * (perplexity / 22.7 - 1):+.1f} %" in str(verification)


def test_templates_by_name(folder, source) -> None:
    (folder / "additional_chat_templates" / "tool_use.jinja").unlink()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("x")
    words = str(verify(folder, source, run=False, progress=False))
    assert "'rag' is not in the source; 'tool_use' is not in the folder" in words


def test_a_folder_without_a_tokenizer_is_wrong(folder, source) -> None:
    (folder / "tokenizer.json").unlink()
    verification = verify(folder, source, run=False, progress=False)
    assert not verification.ok and "holds no tokenizer" in str(verification)
