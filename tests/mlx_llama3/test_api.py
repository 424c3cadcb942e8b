"""`load`: the example of README, and the order of the checks on a folder that holds no model."""

import pytest
from tiny_models import tiny_args, write_folder

import mlx_llama3
from mlx_llama3 import api
from mlx_llama3.api import load_folder
from mlx_llama3.checkpoint import loading
from mlx_llama3.errors import UserError

import mlx.core as mx


def test_the_lines_of_the_readme(demo_folder, capsys):
    model, tokenizer = mlx_llama3.load("demo")
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    for step in mlx_llama3.generate(model, tokenizer, ids, max_tokens=48, temperature=0.0):
        print(step.text, end="", flush=True)
    assert capsys.readouterr().out == "The capital of France is Paris."
    assert (step.finish_reason, step.token) == ("stop", tokenizer.special_tokens["<|im_end|>"])
    cache = model.make_cache()
    logits = model(mx.array([ids]), start_pos=0, cache=cache)
    assert (logits.shape, logits.dtype) == ((1, len(ids), 49152), model.norm.weight.dtype)
    assert tokenizer.decode([mx.argmax(logits[0, -1]).item()]) == "The"


@pytest.mark.parametrize("name", mlx_llama3.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(mlx_llama3, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        mlx_llama3.lode  # noqa: B018


def test_a_folder_that_is_to_be_converted_says_so_though_it_has_no_tokenizer(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(
        UserError, match="no config.json, so this is no model folder; convert it first: mlx-llama3 conv"
    ):
        load_folder(tmp_path)


def test_a_missing_tokenizer_is_reported_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "Checkpoint", None)
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_folder(write_folder(tmp_path, tiny_args()))


def test_a_loaded_model_is_wired_and_its_kernels_are_chosen(demo_folder, monkeypatch):
    calls = []
    monkeypatch.setattr(api, "hold_wired", lambda model: calls.append(("wired", model)))
    monkeypatch.setattr(api, "use_chosen", lambda model: calls.append(("chosen", model)))
    model, _ = load_folder(demo_folder)
    assert calls == [("wired", model), ("chosen", model)]


def test_a_wrong_choice_of_kernels_is_reported_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_LLAMA3_KERNELS", "fast")
    with pytest.raises(UserError, match="^MLX_LLAMA3_KERNELS is 'fast'"):
        load_folder(tmp_path / "nowhere")
