"""The models on this machine, and the memory that they need."""

import json

import pytest
from tiny_models import tiny_args, write_folder

from app.ui.panels import model_list
from mlx_llama3.errors import UserError
from mlx_llama3.system.hub import ALIASES


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_LLAMA3_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def cached(tmp_path, repository, kind="llama"):
    """A snapshot in the hub's cache, as its client lays it out."""
    folder = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = write_folder(folder / "snapshots" / ("a" * 40), tiny_args())
    (snapshot / "config.json").write_text(
        json.dumps(json.loads((snapshot / "config.json").read_text()) | {"model_type": kind})
    )
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_choices_are_the_demo_what_was_converted_what_is_cached_and_the_aliases(tmp_path, monkeypatch):
    mine = write_folder(model_list.models_dir() / "mine", tiny_args())
    (model_list.models_dir() / ".half.partial-1").mkdir()
    cached(tmp_path, "org/llama")
    cached(tmp_path, "org/other", kind="mistral")
    cached(tmp_path, ALIASES["llama3.2-1b"])
    monkeypatch.setattr(model_list, "scan_cache", lambda: None, raising=False)
    names = [name for _, name in model_list.choices()]
    assert names[:2] == ["demo", str(mine)]
    assert names[2:4] == [ALIASES["llama3.2-1b"], "org/llama"]
    assert names[4:] == [alias for alias in ALIASES if alias != "llama3.2-1b"]


def test_needs_counts_what_the_loaded_model_takes(tmp_path):
    folder = write_folder(tmp_path / "model", tiny_args())
    weights, cache = model_list.needs(folder)
    from mlx_llama3.checkpoint.loading import load_model

    model = load_model(folder)
    assert weights == sum(array.nbytes for _, array in model_arrays(model))
    assert cache == 3 * 2 * 2 * 16 * 512 * 4  # layers, keys and values, heads, width, context, float32


def model_arrays(model):
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())


def test_estimate_is_a_sentence(tmp_path):
    folder = write_folder(tmp_path / "model", tiny_args())
    assert "needs about" in model_list.estimate(str(folder)) and "available" in model_list.estimate(str(folder))
    snapshot = cached(tmp_path, "org/llama")
    assert model_list.estimate("org/llama") == model_list.estimate(str(snapshot))
    assert model_list.estimate("org/absent") == "not on this machine: Load downloads it"
    assert model_list.estimate("/nowhere/at/all") == "no such model"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in model_list.estimate(str(empty))
    with pytest.raises(UserError):
        model_list.needs(empty)
