"""Prompt caches: a loaded one gives the same logits as the saved one, and one of another model is refused."""

import json

import numpy as np
import pytest
from tiny_models import quantized, random_weights, tiny_args, write_folder

from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.conversation import prompt_cache
from mlx_llama3.conversation.fingerprint import model_fingerprint, tokenizer_fingerprint
from mlx_llama3.errors import UserError
from mlx_llama3.generation.decoding import prefill
from mlx_llama3.model.cache.prefix import PrefixCache
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.layers import tiled_linear as cpu

import mlx.core as mx

ARGS = tiny_args(n_layers=2, head_dim=64)
IDS = [(7 * i) % 300 for i in range(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_folder(tmp_path_factory.mktemp("tiny"), ARGS))


@pytest.fixture(params=[CacheSettings(), CacheSettings(max_kv_size=16), CacheSettings(kv_bits=8)], ids=repr)
def settings(request) -> CacheSettings:
    return request.param


def filled_cache(model, settings=None) -> PrefixCache:
    settings = settings or CacheSettings()
    cache = PrefixCache(model.make_cache(settings), settings)
    mx.eval(prefill(model, IDS, cache.layers))
    cache.set_ids(IDS)
    return cache


@pytest.fixture
def file(model, llama31, tmp_path):
    path = tmp_path / "c.safetensors"
    prompt_cache.save(path, filled_cache(model), model, llama31, name="tiny")
    return path


@pytest.mark.parametrize("agrees", [300, 297, 150])
def test_goes_on_as_if_never_saved(model, llama31, tmp_path, settings, agrees):
    """The next logits with the loaded and the saved cache agree bitwise, for prompts that extend it or branch off."""
    path, saved = tmp_path / "c.safetensors", filled_cache(model, settings)
    prompt_cache.save(path, saved, model, llama31, name="tiny")
    loaded = prompt_cache.load(path, model, llama31)
    assert loaded.ids == IDS and loaded.settings == settings
    new = [*IDS[:agrees], 301, 302, 303]
    logits = []
    for cache in (saved, loaded):
        rest = cache.reuse(new)
        logits.append(np.array(model(mx.array([rest]), len(cache.ids), cache.layers)))
    np.testing.assert_array_equal(*logits)


def test_used_twice_the_file_stays_as_it_is(model, llama31, file):
    before = file.read_bytes()
    for _ in range(2):
        loaded = prompt_cache.load(file, model, llama31)
        mx.eval(model(mx.array([[1]]), len(IDS), loaded.layers))
    assert file.read_bytes() == before


def test_another_model_or_tokenizer_is_refused(model, llama31, llama30, file, tmp_path):
    with pytest.raises(UserError, match="made with tiny, whose tokenizer is another one; make it anew"):
        prompt_cache.load(file, model, llama30)
    weights = random_weights(ARGS)
    tuned = weights | {"model.layers.1.mlp.down_proj.weight": weights["model.layers.1.mlp.down_proj.weight"] * 1.01}
    others = (
        load_model(write_folder(tmp_path / "tuned", ARGS, tuned)),
        load_model(write_folder(tmp_path / "theta", tiny_args(n_layers=2, head_dim=64, rope_theta=5e5), weights)),
        load_model(write_folder(tmp_path / "tiny", ARGS, weights), dtype=mx.float16),
    )
    for other in others:
        with pytest.raises(UserError, match="not with the weights and the dtype of this model"):
            prompt_cache.load(file, other, llama31)
    same = load_model(write_folder(tmp_path / "same", ARGS, weights))
    assert prompt_cache.load(file, same, llama31).ids == IDS


def test_damage_is_refused(model, llama31, file):
    """A flipped bit in the length, the header or the data, and missing or extra bytes at the end."""
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    random = np.random.default_rng(0)
    places = [0, 3, *random.integers(8, header, 30), *random.integers(header, len(whole), 30), len(whole) - 1]
    for place in map(int, places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(random.integers(7))
        file.write_bytes(damaged)
        try:
            loaded = prompt_cache.load(file, model, llama31)
        except UserError as error:
            assert "make it anew" in str(error) and "\n" not in str(error)
        else:  # only where the header tolerates it: the model's name, a space
            assert place < header
            assert loaded.ids == IDS
    for content in (whole[:-1], whole + b"x", whole[: header + 5], whole[:100], whole[:5], b""):
        file.write_bytes(content)
        with pytest.raises(UserError, match="make it anew"):
            prompt_cache.load(file, model, llama31)


def test_what_is_no_prompt_cache(model, llama31, tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(UserError, match="x.safetensors: no such file$"):
        prompt_cache.load(path, model, llama31)
    mx.save_safetensors(str(path), {"a": mx.ones(3)})
    before = path.read_bytes()
    with pytest.raises(UserError, match="not a prompt cache"):
        prompt_cache.load(path, model, llama31)
    with pytest.raises(UserError, match="is there and is no whole prompt cache; choose another name"):
        prompt_cache.save(path, filled_cache(model), model, llama31, name="tiny")
    assert path.read_bytes() == before
    with pytest.raises(UserError, match="there is no folder"):
        prompt_cache.save(tmp_path / "no" / "c.safetensors", filled_cache(model), model, llama31, name="tiny")


def test_newer_versions_are_refused(model, llama31, file, monkeypatch):
    monkeypatch.setattr(prompt_cache, "VERSION", "2")
    with pytest.raises(UserError, match="has version 1; this program reads 2"):
        prompt_cache.load(file, model, llama31)


def test_fingerprints(tmp_path, llama31, llama30):
    weights = random_weights(ARGS)
    packed = write_folder(tmp_path / "q", ARGS, quantized(weights), quantization={"bits": 4, "group_size": 32})
    assert json.loads((packed / "config.json").read_text())["quantization"]
    expanded = load_model(packed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "use_tiled_layers", lambda *_: None)
        assert model_fingerprint(load_model(packed)) == model_fingerprint(expanded)
    assert tokenizer_fingerprint(llama31) != tokenizer_fingerprint(llama30)
