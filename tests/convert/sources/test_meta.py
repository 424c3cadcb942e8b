"""Meta's checkpoints: every tensor read from its shards equals the tensor before sharding."""

import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from meta_checkpoint import PARAMS, hf_rows, meta_weights, write_meta, write_tokenizer_model
from safetensors.numpy import save_file
from torch_zip import write_pth

from convert.sources.meta import is_meta_folder, open_meta
from convert.sources.source import Source
from mlx_llama3.checkpoint.tensor_names import hf_to_official
from mlx_llama3.errors import UserError

import mlx.core as mx

DATA = Path(__file__).parents[2] / "data"
HEAD_DIM = PARAMS["dim"] // PARAMS["n_heads"]


def values(source: Source, name: str, block: int | None = None) -> np.ndarray:
    """A tensor of a source in float32, read in blocks of `block` rows."""
    tensor = source.tensors[name]
    block = block or tensor.shape[0]
    parts = [tensor.rows(at, min(at + block, tensor.shape[0])) for at in range(0, tensor.shape[0], block)]
    assert all(part.dtype == tensor.dtype for part in parts)
    return np.asarray(mx.concatenate(parts).astype(mx.float32))


@pytest.mark.parametrize("kind, dtype", [("BF16", mx.bfloat16), ("F16", mx.float16), ("F32", mx.float32)])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_merged_tensors_equal_the_whole(tmp_path, count, kind, dtype):
    """With 8 shards there are more shards than KV heads (4), so k and v are there twice."""
    weights = meta_weights()
    source = open_meta(write_meta(tmp_path, count, weights, kind=kind))
    assert source.kind == f"Meta checkpoint, {count} shard{'s' if count > 1 else ''}"
    assert len(source.tensors) == len(weights) and not source.args.tie_word_embeddings
    for name, tensor in source.tensors.items():
        official = hf_to_official(name)
        expected = hf_rows(official, weights[official], HEAD_DIM)
        assert tensor.dtype == dtype and tensor.shape == expected.shape
        np.testing.assert_array_equal(values(source, name), expected)
        np.testing.assert_array_equal(values(source, name, block=5), expected)  # block borders inside heads and shards


def test_sixteen_shards_sort_by_number(tmp_path):
    """Names without leading zeros: as text, 10 would come before 2."""
    params = PARAMS | {"n_heads": 16, "n_kv_heads": 16}
    weights = meta_weights(params)
    write_meta(tmp_path, 16, weights, params=params)
    for rank in range(16):
        (tmp_path / f"consolidated.{rank:02d}.pth").rename(tmp_path / f"consolidated.{rank}.pth")
    source = open_meta(tmp_path)
    np.testing.assert_array_equal(values(source, "model.embed_tokens.weight"), weights["tok_embeddings.weight"])


class _Stubs(pickle.Unpickler):
    """Python's own unpickler, with stubs for torch's names: independent of the reader under test."""

    def find_class(self, module, name):
        return dict if name == "OrderedDict" else lambda *arguments: arguments

    def persistent_load(self, pid):
        return pid[2]


def golden_tensors(path: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        root = path.stem
        with archive.open(f"{root}/data.pkl") as file:
            table = _Stubs(file).load()
        arrays = {}
        for name, (key, _, shape, *_) in table.items():
            bits = np.frombuffer(archive.read(f"{root}/data/{key}"), np.uint16)
            if name != "rope.freqs":
                arrays[name] = (bits.astype(np.uint32) << 16).view(np.float32).reshape(shape)
        return arrays


@pytest.mark.parametrize("name", ["llama3-1shard", "llama31-2shards", "llama31-long"])
def test_golden_folders_equal_a_plain_merge(name):
    source = open_meta(DATA / name)
    shards = [golden_tensors(path) for path in sorted((DATA / name).glob("*.pth"))]
    for hf, tensor in source.tensors.items():
        official = hf_to_official(hf)
        parts = [shard[official] for shard in shards]
        kind = official.split(".")[-2]
        whole = parts[0] if parts[0].ndim == 1 else np.concatenate(parts, axis=1 if kind in ("wo", "w2") else 0)
        assert tensor.shape == whole.shape
        np.testing.assert_array_equal(values(source, hf), hf_rows(official, whole, source.args.head_dim))


@pytest.mark.parametrize("form", ["consolidated.safetensors", "consolidated.00.safetensors"])
def test_consolidated_safetensors(tmp_path, form):
    weights = meta_weights()
    save_file({name: array.astype(np.float16) for name, array in weights.items()}, tmp_path / form)
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    source = open_meta(tmp_path)
    for hf in source.tensors:
        np.testing.assert_array_equal(
            values(source, hf), hf_rows(hf_to_official(hf), weights[hf_to_official(hf)], HEAD_DIM)
        )


def test_both_kinds_of_file_in_one_folder(tmp_path):
    write_meta(tmp_path)
    save_file(
        {name: array.astype(np.float16) for name, array in meta_weights().items()},
        tmp_path / "consolidated.safetensors",
    )
    source = open_meta(tmp_path)
    assert source.tensors["model.norm.weight"].dtype == mx.float16
    assert source.notes[0] == f"{tmp_path.name} holds consolidated files of both kinds; only *.safetensors were read"


@pytest.mark.parametrize("count", [1, 2])
def test_head_equal_to_the_embedding_is_tied(tmp_path, count):
    weights = meta_weights()
    weights["output.weight"] = weights["tok_embeddings.weight"]
    source = open_meta(write_meta(tmp_path / "a", count, weights))
    assert source.args.tie_word_embeddings and "lm_head.weight" not in source.tensors
    assert "stored once" in source.notes[0]
    del weights["output.weight"]
    source = open_meta(write_meta(tmp_path / "b", count, weights))
    assert source.args.tie_word_embeddings and "stored once" not in source.notes[0]


def test_head_that_differs_in_its_last_number_is_not_tied(tmp_path):
    weights = meta_weights()
    weights["output.weight"] = weights["tok_embeddings.weight"].copy()
    weights["output.weight"][-1, -1] += 1
    assert not open_meta(write_meta(tmp_path, 2, weights)).args.tie_word_embeddings


def test_vocabulary_that_the_tokenizer_should_give(tmp_path):
    assert open_meta(write_meta(tmp_path, 2, vocab_size=-1)).args.vocab_size == 256


def test_rope_factor(tmp_path):
    write_meta(tmp_path, use_scaled_rope=True)
    assert open_meta(tmp_path).args.rope_scaling.factor == 8
    assert open_meta(tmp_path, rope_factor=32).args.rope_scaling.factor == 32
    with pytest.raises(UserError, match="factor"):
        open_meta(tmp_path, rope_factor=-3)
    write_meta(tmp_path / "3.0")
    with pytest.raises(
        UserError, match="3.0/params.json: says nothing of use_scaled_rope, so --rope-factor has no use"
    ):
        open_meta(tmp_path / "3.0", rope_factor=8)


@pytest.mark.parametrize("scaled, ends", [(False, [301, 309]), (True, [301, 308, 309])])
def test_tokenizer_and_stop_tokens(tmp_path, scaled, ends):
    """<|eom_id|> is a reserved token in 3.0."""
    params = PARAMS | {"vocab_size": 556, "use_scaled_rope": scaled}
    write_meta(tmp_path / "meta", params=params)
    write_tokenizer_model(tmp_path / "meta" / "tokenizer.model", 300)
    source = open_meta(tmp_path / "meta")
    assert source.generation_config == {"bos_token_id": 300, "eos_token_id": ends} and not source.notes
    (tmp_path / "out").mkdir()
    assert set(source.write_tokenizer(tmp_path / "out")) == {path.name for path in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_tokenizer_of_another_model(tmp_path):
    write_tokenizer_model(write_meta(tmp_path) / "tokenizer.model", 300)
    assert "has 556 tokens, but the embedding has 256" in refused(tmp_path)


def test_folder_without_a_tokenizer_says_so(tmp_path):
    source = open_meta(write_meta(tmp_path))
    assert source.notes == [f"no tokenizer.model in {tmp_path}: the new folder runs, but not on text"]
    assert source.generation_config == {} and source.write_tokenizer(tmp_path) == []


def test_recognised_by_its_files(tmp_path):
    assert not is_meta_folder(tmp_path)
    write_meta(tmp_path)
    assert is_meta_folder(tmp_path)
    (tmp_path / "params.json").unlink()
    assert not is_meta_folder(tmp_path)


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        source = open_meta(folder)
        for name in source.tensors:
            values(source, name)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_shard(tmp_path):
    write_meta(tmp_path, 4)
    (tmp_path / "consolidated.01.pth").unlink()
    assert "consolidated.01.pth is missing; files up to number 3" in refused(tmp_path)


def test_missing_last_shard_shows_in_the_shapes(tmp_path):
    write_meta(tmp_path, 4)
    (tmp_path / "consolidated.03.pth").unlink()
    assert (
        "tok_embeddings.weight has shape (64, 64) in each of 3 shards, params.json means (256, 64) in all"
        in refused(tmp_path)
    )


def test_two_shards_of_one_number(tmp_path):
    write_meta(tmp_path, 2)
    (tmp_path / "consolidated.1.pth").write_bytes(b"")
    assert "has the number of" in refused(tmp_path)


def test_shards_of_models_of_other_sizes(tmp_path):
    write_meta(tmp_path / "a", 2)
    write_meta(tmp_path / "b", 2, params=PARAMS | {"dim": 128})
    (tmp_path / "b" / "consolidated.01.pth").rename(tmp_path / "a" / "consolidated.01.pth")
    message = refused(tmp_path / "a")
    assert "consolidated.01.pth: tok_embeddings.weight is BF16 (128, 128), but BF16 (128, 64)" in message


def test_shards_of_models_with_other_tensors(tmp_path):
    write_meta(tmp_path / "a", 2)
    write_meta(tmp_path / "b", 2, params=PARAMS | {"n_layers": 1})
    (tmp_path / "b" / "consolidated.01.pth").rename(tmp_path / "a" / "consolidated.01.pth")
    message = refused(tmp_path / "a")
    assert "layers.1.attention.wk.weight is only in consolidated.00.pth; the shards are not of one model" in message


def test_shards_of_two_models_of_one_size(tmp_path):
    """Shards of two fine-tunes: only the norms, which every shard repeats, show it."""
    write_meta(tmp_path / "a", 2)
    write_meta(tmp_path / "b", 2, meta_weights(seed=1))
    (tmp_path / "b" / "consolidated.01.pth").rename(tmp_path / "a" / "consolidated.01.pth")
    assert "consolidated.01.pth: layers.0.attention_norm.weight differs from that in consolidated.00.pth" in refused(
        tmp_path / "a"
    )


def test_norms_may_differ_a_little(tmp_path):
    """The norms of ranks drift apart by rounding; up to 1e-2 the first one is used."""
    write_meta(tmp_path / "a", 2)
    weights = meta_weights()
    weights["norm.weight"] = weights["norm.weight"] + np.float32(2**-7)
    write_meta(tmp_path / "b", 2, weights)
    (tmp_path / "b" / "consolidated.01.pth").rename(tmp_path / "a" / "consolidated.01.pth")
    source = open_meta(tmp_path / "a")
    np.testing.assert_array_equal(values(source, "model.norm.weight"), meta_weights()["norm.weight"])


def test_copies_of_kv_heads_that_differ(tmp_path):
    write_meta(tmp_path / "a", 8)
    weights = meta_weights()
    weights["layers.1.attention.wk.weight"] = weights["layers.1.attention.wk.weight"] * 2
    write_meta(tmp_path / "b", 8, weights)
    (tmp_path / "b" / "consolidated.05.pth").rename(tmp_path / "a" / "consolidated.05.pth")
    message = refused(tmp_path / "a")
    assert (
        "consolidated.05.pth: layers.1.attention.wk.weight should repeat the KV heads of consolidated.04.pth" in message
    )


def test_missing_and_unknown_tensors(tmp_path):
    weights = meta_weights()
    del weights["layers.1.feed_forward.w2.weight"]
    assert "layers.1.feed_forward.w2.weight is missing" in refused(write_meta(tmp_path / "a", weights=weights))
    weights = meta_weights() | {"layers.2.attention.wq.weight": np.zeros((64, 64), np.float32)}
    assert "'layers.2.attention.wq.weight' is not part of" in refused(write_meta(tmp_path / "b", weights=weights))
    weights = meta_weights()
    del weights["tok_embeddings.weight"]
    assert "tok_embeddings.weight is missing" in refused(write_meta(tmp_path / "c", weights=weights))


def test_shape_that_params_json_does_not_mean(tmp_path):
    assert "params.json means" in refused(write_meta(tmp_path, multiple_of=256))


@pytest.mark.parametrize(
    "written, named",
    [
        (
            {"quantization_args": {"group_size": 32, "scheme": "int4_weight_int8_dynamic_activation"}},
            "quantization_args",
        ),
        ({"lora_args": {"rank": 16, "scale": 2.0}}, "lora_args"),
        ({"vision_chunk_size": 560, "vision_max_num_chunks": 4}, "vision"),
    ],
)
def test_other_kinds_of_metas_checkpoints_are_refused_in_a_sentence(tmp_path, written, named):
    assert named in refused(write_meta(tmp_path, **written))


def test_int8_weights_without_a_word_in_params_json(tmp_path):
    write_meta(tmp_path)
    tensors = {name: ("I8", array.astype(np.int8)) for name, array in meta_weights().items()}
    write_pth(tmp_path / "consolidated.00.pth", tensors)
    assert "tok_embeddings.weight is stored as I8" in refused(tmp_path)
