"""The written tokenizer files load in transformers and mlx-lm and give the same ids everywhere."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from tokenizer_samples import META_MODEL, SMOLLM_MISSING, TEXTS, small_bpe, texts
from tokenizers import AddedToken
from transformers import AutoTokenizer

from convert.sources.tokenizer_files import copy_tokenizer_files, write_tokenizer
from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.llama3_format import llama3_chat_template
from mlx_llama3.tokenizer.tokenizer import load_tokenizer
from mlx_llama3.tokenizer.vocabulary.vocabulary import Vocabulary

import mlx.core as mx
from mlx_lm.tokenizer_utils import load as mlx_lm_load

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "What is the capital of France?"},
]


def write(folder, vocabulary, **options):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return write_tokenizer(vocabulary, folder, **options)


@pytest.fixture(scope="module")
def llama3_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama3")
    names = write(
        folder,
        Vocabulary.from_tokenizer_model(META_MODEL, "3.1"),
        chat_template=llama3_chat_template("3.1"),
        model_max_length=131072,
        tokenizer_model=META_MODEL,
    )
    assert sorted(names) == ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    assert {path.name for path in folder.iterdir()} == {*names, "config.json"}
    return folder


@pytest.fixture(scope="module")
def smollm_folder(tmp_path_factory, demo_gguf):
    _, metadata = mx.load(str(demo_gguf), return_metadata=True)
    folder = tmp_path_factory.mktemp("smollm")
    write(folder, Vocabulary.from_gguf(metadata), chat_template=metadata["tokenizer.chat_template"])
    return folder


@pytest.fixture(scope="module", params=["llama3_folder", "smollm_folder"])
def both(request):
    """Our tokenizer and transformers' of one folder."""
    folder = request.getfixturevalue(request.param)
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


def plain_ids(peer, text):
    return peer.encode(text, add_special_tokens=False, split_special_tokens=True)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts())
def test_ids_of_any_text(both, text):
    ours, peer = both
    if not ours.add_bos:  # SmolLM: control characters that are no tokens, see test_gguf_vocabulary
        text = text.encode().translate(None, SMOLLM_MISSING).decode(errors="replace")
    assert ours.encode(text) == plain_ids(peer, text)
    assert ours.encode(text, bos=True, allow_special=True) == peer.encode(text)


def test_ids_and_text_of_every_token(both):
    ours, peer = both
    assert ours.vocab_size == len(peer)
    for n, token in enumerate(ours.vocabulary.tokens):
        assert ours.decode([n], keep_special=True) == peer.decode([n], clean_up_tokenization_spaces=False)
        text = token.decode(errors="ignore")
        if text.encode() == token:
            assert ours.encode(text) == plain_ids(peer, text)


def test_chat(both):
    ours, peer = both
    rendered = peer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(MESSAGES) == rendered
    assert ours.encode_chat(MESSAGES) == peer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert rendered.count("<|begin_of_text|>") == ours.add_bos


def test_named_tokens(both):
    ours, peer = both
    assert peer.bos_token_id == ours.bos_id
    assert peer.eos_token_id in ours.stop_ids
    assert peer.model_max_length == (131072 if ours.add_bos else int(1e30))


def test_mlx_lm_decodes_with_its_fast_detokenizer(llama3_folder, smollm_folder):
    for folder in (llama3_folder, smollm_folder):
        peer, ours = mlx_lm_load(folder), load_tokenizer(folder)
        assert type(peer.detokenizer).__name__ == "BPEStreamingDetokenizer"
        ids = ours.encode("naïve 日本語 \U0001f600, 12 of them.\n\tx")
        assert peer.decode(ids) == ours.decode(ids)


def test_without_meta_file_beside_the_ids_are_the_same(llama3_folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((llama3_folder / name).read_bytes())
    alone, both = load_tokenizer(tmp_path), load_tokenizer(llama3_folder)
    assert alone.vocabulary.ranks == both.vocabulary.ranks
    assert list(alone.vocabulary.tokens) == list(both.vocabulary.tokens)
    assert alone.stop_ids == both.stop_ids == {128001, 128008, 128009}


def test_merges_of_meta_are_those_of_the_published_file(llama3_folder):
    # Number and first entries as in the `tokenizer.json` that Meta publishes at the hub.
    model = json.loads((llama3_folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    assert len(model["vocab"]) == 128000
    assert len(model["merges"]) == 280147
    assert model["merges"][:4] == ["Ġ Ġ", "Ġ ĠĠĠ", "ĠĠ ĠĠ", "ĠĠĠ Ġ"]
    assert model["ignore_merges"] is True


def test_ids_out_of_order_holes_and_an_unknown_token(tmp_path):
    peer = small_bpe("gpt2", missing=b"\t")
    peer.add_tokens([AddedToken("<plain>", normalized=False)])
    document = json.loads(peer.to_str())
    words = document["model"]["vocab"]
    words["the"], words["at"] = words["at"], words["the"]
    document["model"]["unk_token"] = "<|endoftext|>"
    document["added_tokens"].append({"id": 700, "content": "<far>", "special": True})
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    first = load_tokenizer(tmp_path)
    target = tmp_path / "again"
    target.mkdir()
    write(target, first.vocabulary)
    again, peer = load_tokenizer(target), AutoTokenizer.from_pretrained(target)
    assert list(again.vocabulary.tokens) == list(first.vocabulary.tokens)
    assert (again.special_tokens, again.vocabulary.added) == (first.special_tokens, first.vocabulary.added)
    for text in [*TEXTS, "<far><plain>\tthe cat sat at"]:
        assert again.encode(text) == first.encode(text) == plain_ids(peer, text)
        assert again.encode(text, allow_special=True) == peer.encode(text)


def test_base_models_have_no_template(tmp_path):
    (tmp_path / "tokenizer.json").write_text(small_bpe().to_str())
    write(tmp_path, load_tokenizer(tmp_path).vocabulary)
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


def test_copy(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    files = [
        "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
        "merges.txt", "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
    ]  # fmt: skip
    (source / "additional_chat_templates").mkdir(parents=True)
    target.mkdir()
    for name in [*files, "config.json", "model.safetensors", "README.md"]:
        (source / name).write_bytes(name.encode() + b"\r\n\xff")
    assert sorted(copy_tokenizer_files(source, target)) == sorted(files)
    copied = {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert copied == {name: name.encode() + b"\r\n\xff" for name in files}


def test_copy_needs_a_tokenizer(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds no tokenizer; expected tokenizer.json or tokenizer.model"):
        copy_tokenizer_files(tmp_path, tmp_path)
