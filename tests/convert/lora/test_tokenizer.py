"""The tokenizer and chat template beside an adapter are taken along, or it is said why not."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_adapters import peft_folder
from tiny_models import random_weights, tiny_args, write_folder
from tokenizer_samples import small_bpe
from tokenizers import AddedToken

from convert.conversion.to_gguf import to_gguf
from convert.conversion.to_mlx import convert
from convert.gguf.split_files import read_gguf
from convert.lora.fuse import with_adapter
from convert.sources.open import open_source
from mlx_llama3.tokenizer.tokenizer import load_tokenizer

import mlx.core as mx

ARGS = tiny_args(vocab_size=448)
WEIGHTS = random_weights(ARGS)
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
UPDATE = {f"{MODULE}.lora_A.weight": mx.ones((4, 64)) / 10, f"{MODULE}.lora_B.weight": mx.ones((64, 4)) / 10}
MESSAGES = [{"role": "user", "content": "hi"}]


def template(mark: str) -> str:
    return "{% for m in messages %}" + mark + "{{ m.role }}: {{ m.content }}\n{% endfor %}"


def write_tokenizer(folder: Path, *, added: str = "", **config) -> None:
    tokenizer = small_bpe()
    tokenizer.add_special_tokens([AddedToken(added, special=True)] if added else [])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"} | config))


@pytest.fixture
def base(tmp_path) -> Path:
    folder = write_folder(tmp_path / "base", ARGS, WEIGHTS, eos_token_id=0)
    write_tokenizer(folder, chat_template=template("BASE "))
    return folder


@pytest.fixture
def adapter(tmp_path) -> Path:
    return peft_folder(tmp_path, UPDATE)


def fused(base: Path, adapter: Path) -> tuple[Path, str]:
    """The folder written, and the notes on tokenizer and template."""
    target = base.with_name("out")
    report = convert(base, target, adapter=adapter, progress=False)
    return target, "; ".join(note for note in report.notes if "token" in note or "template" in note)


def prompt(folder: Path) -> str:
    return load_tokenizer(folder).render_chat(MESSAGES)


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_tokenizer_and_template(base, adapter, place):
    inside = {"chat_template": template("OWN ")} if place == "tokenizer_config.json" else {}
    write_tokenizer(adapter, added="<|turn|>", eos_token="<|turn|>", **inside)
    if not inside:
        (adapter / place).write_text(template("OWN "))
    folder, notes = fused(base, adapter)
    tokenizer = load_tokenizer(folder)
    turn = tokenizer.special_tokens["<|turn|>"]
    assert prompt(folder).startswith("OWN user") and notes == "the tokenizer and the chat template are the adapter's"
    assert (folder / "tokenizer.json").read_bytes() == (adapter / "tokenizer.json").read_bytes()
    # mlx-lm reads the stop tokens of config.json only.
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [0, turn]


def test_tokenizer_without_a_template_keeps_the_models(base, adapter):
    write_tokenizer(adapter)
    folder, notes = fused(base, adapter)
    assert prompt(folder).startswith("BASE user") and notes == "the tokenizer is the adapter's"
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 0


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_template_alone(base, adapter, place):
    """The model's own templates are left aside, those of other names too, wherever they are stored."""
    (base / "chat_template.jinja").write_text(template("BASE "))
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text(template("TOOLS "))
    own = template("OWN ")
    (adapter / place).write_text(own if place.endswith("jinja") else json.dumps({"chat_template": own}))
    folder, notes = fused(base, adapter)
    assert prompt(folder).startswith("OWN user") and notes == "the chat template is the adapter's"
    assert load_tokenizer(folder).chat_templates == {"default": own}
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {"eos_token": "<|endoftext|>"}


def test_named_templates_of_the_adapter(base, adapter):
    (adapter / "additional_chat_templates").mkdir()
    (adapter / "additional_chat_templates" / "tool_use.jinja").write_text(template("TOOLS "))
    (adapter / "chat_template.jinja").write_text(template("OWN "))
    folder, _ = fused(base, adapter)
    assert load_tokenizer(folder).chat_templates == {"default": template("OWN "), "tool_use": template("TOOLS ")}


def test_tokenizer_of_a_larger_vocabulary(base, adapter):
    write_tokenizer(adapter, chat_template=template("OWN "))
    document = json.loads((adapter / "tokenizer.json").read_text())
    document["added_tokens"] += [
        {"id": n, "content": f"<{n}>", "special": True, "normalized": False, "lstrip": False, "rstrip": False,
         "single_word": False}
        for n in range(load_tokenizer(adapter).vocab_size, 450)
    ]  # fmt: skip
    (adapter / "tokenizer.json").write_text(json.dumps(document))
    folder, notes = fused(base, adapter)
    assert prompt(folder).startswith("BASE user") and load_tokenizer(folder).vocab_size < 448
    assert notes == (
        "the adapter's tokenizer.json, tokenizer_config.json left aside, which do not fit the model: "
        "450 tokens, the model has 448"
    )


LEFT_ASIDE = {
    "no tokenizer": ("tokenizer.json", "{", "tokenizer.json left aside"),
    "no vocabulary and no template": ("special_tokens_map.json", "{}", "neither a vocabulary nor a chat template"),
}


@pytest.mark.parametrize("name, text, said", LEFT_ASIDE.values(), ids=LEFT_ASIDE)
def test_what_cannot_be_taken_is_named(base, adapter, name, text, said):
    (adapter / name).write_text(text)
    folder, notes = fused(base, adapter)
    assert prompt(folder).startswith("BASE user") and said in notes and "\n" not in notes


def test_model_without_a_tokenizer(base, adapter):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(base / name, adapter / name)
    folder, notes = fused(base, adapter)
    assert prompt(folder).startswith("BASE user") and notes == "the tokenizer and the chat template are the adapter's"
    (adapter / "tokenizer.json").unlink()
    shutil.rmtree(folder)
    folder, notes = fused(base, adapter)
    assert not (folder / "tokenizer_config.json").exists() and "left aside" in notes


def test_adapter_that_brings_none(base, adapter):
    folder, notes = fused(base, adapter)
    assert prompt(folder).startswith("BASE user") and notes == ""
    assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_template_in_a_gguf_file(base, adapter):
    (adapter / "chat_template.jinja").write_text(template("OWN "))
    to_gguf(base, base.with_name("out.gguf"), adapter=adapter, progress=False)
    assert read_gguf(base.with_name("out.gguf")).metadata["tokenizer.chat_template"] == template("OWN ")


def test_adapter_is_part_of_the_source(base, adapter):
    """So that `--overwrite` cannot remove it."""
    write_tokenizer(adapter)
    files = with_adapter(open_source(base), adapter).files
    assert {path for path in files if path.parent == adapter} == set(adapter.iterdir())
