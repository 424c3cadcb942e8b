import json
import random
import shutil

import pytest
from hypothesis import given
from tokenizer_samples import META_MODEL, TEXTS, small_bpe, texts
from tokenizers import AddedToken, Tokenizer as Peer

from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.tokenizer import Tokenizer
from mlx_llama3.tokenizer.vocabulary import tokenizer_json
from mlx_llama3.tokenizer.vocabulary.bpe_ranks import to_merges
from mlx_llama3.tokenizer.vocabulary.byte_level import to_text
from mlx_llama3.tokenizer.vocabulary.pretokenizers import LLAMA3
from mlx_llama3.tokenizer.vocabulary.tokenizer_model import read_ranks, special_tokens
from mlx_llama3.tokenizer.vocabulary.vocabulary import Vocabulary

SMALL = json.loads(small_bpe().to_str())


def read(folder, document=None, **files):
    """Read a folder with this `tokenizer.json` and other JSON files, named without `.json`."""
    for name, content in {"tokenizer": SMALL if document is None else document, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False))
    return Vocabulary.from_tokenizer_json(folder / "tokenizer.json")


def changed(**parts):
    """The small document with other parts; a dict for `model` is merged into the model."""
    return SMALL | parts | {"model": SMALL["model"] | parts.get("model", {})}


def shuffled():
    """The same tokenizer with shuffled ids, so that only the merges give the order."""
    words = SMALL["model"]["vocab"]
    plain = [word for word in words if not word.startswith("<|")]
    ids = [words[word] for word in plain]
    random.Random(0).shuffle(ids)
    return changed(model={"vocab": words | dict(zip(plain, ids, strict=True))})


DOCUMENTS = {
    "llama3": SMALL,
    "gpt2": json.loads(small_bpe("gpt2").to_str()),
    "smollm": json.loads(small_bpe("smollm").to_str()),
    "merges as strings": changed(model={"merges": [" ".join(pair) for pair in SMALL["model"]["merges"]]}),
    "ids not in the order of the merges": shuffled(),
    "unknown token": json.loads(small_bpe(missing=b"\t\x04").to_str()) | {},
}
DOCUMENTS["unknown token"]["model"]["unk_token"] = "<|endoftext|>"
PEERS = {name: Peer.from_str(json.dumps(document)) for name, document in DOCUMENTS.items()}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {name: Tokenizer(read(tmp_path_factory.mktemp("t"), document)) for name, document in DOCUMENTS.items()}


@pytest.mark.parametrize("name", DOCUMENTS)
@given(text=texts())
def test_ids_are_those_of_the_library(tokenizers, name, text):
    peer = PEERS[name]
    peer.encode_special_tokens = True
    assert tokenizers[name].encode(text) == peer.encode(text, add_special_tokens=False).ids
    peer.encode_special_tokens = False
    assert tokenizers[name].encode(text, allow_special=True) == peer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_id_has_the_bytes_of_the_library(tokenizers, name):
    for n in range(PEERS[name].get_vocab_size()):
        assert tokenizers[name].decode([n], keep_special=True) == PEERS[name].decode([n], skip_special_tokens=False)


def test_added_tokens(tmp_path):
    peer = Peer.from_str(json.dumps(SMALL))
    peer.add_special_tokens(["<call>"])
    peer.add_tokens([AddedToken("<｜User｜>", normalized=False), AddedToken("the cat", normalized=False)])
    vocabulary = read(tmp_path, json.loads(peer.to_str()))
    n = SMALL["added_tokens"][-1]["id"]
    assert vocabulary.special == {
        "<|endoftext|>": 0,
        "<|im_start|>": 1,
        "<|im_end|>": 2,
        "<call>": n + 1,
        "<｜User｜>": n + 2,
    }
    assert vocabulary.added == {"<think>": n, "the cat": n + 3}
    tokenizer = Tokenizer(vocabulary)
    text = "<think>x<call>on the cats <｜User｜>"
    assert tokenizer.encode(text, allow_special=True) == peer.encode(text).ids
    plain = tokenizer.encode(text)
    assert n in plain and n + 3 in plain  # ordinary text, matched whole
    assert not {n + 1, n + 2} & set(plain)  # control tokens, though one of them is not marked as special
    assert tokenizer.decode(plain) == text


def test_added_tokens_of_the_configuration_count_too(tmp_path):
    config = {"added_tokens_decoder": {"900": {"content": "<x>", "special": True}, "0": {"content": "<|endoftext|>"}}}
    vocabulary = read(tmp_path, tokenizer_config=config)
    assert vocabulary.special["<x>"] == 900
    assert vocabulary.special["<|endoftext|>"] == 0
    assert len(vocabulary.tokens) == 901
    assert vocabulary.tokens[890] == b""


BOS = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
TEMPLATE = {"type": "TemplateProcessing", "single": [BOS, {"Sequence": {"id": "A", "type_id": 0}}]}
NO_BOS = TEMPLATE | {"single": [{"Sequence": {"id": "A", "type_id": 0}}, BOS]}


@pytest.mark.parametrize(
    ("processor", "config", "bos", "adds"),
    [
        (None, {}, None, False),
        (None, {"bos_token": "<|im_start|>"}, 1, False),
        (TEMPLATE, {}, 1, True),
        (TEMPLATE, {"bos_token": {"content": "<|im_start|>"}}, 1, True),
        ({"type": "Sequence", "processors": [{"type": "ByteLevel"}, TEMPLATE]}, {}, 1, True),
        (NO_BOS, {"bos_token": "<|im_start|>"}, 1, False),
        (TEMPLATE, {"bos_token": "<|im_start|>", "add_bos_token": False}, 1, False),
        (None, {"bos_token": "<|im_start|>", "add_bos_token": True}, 1, True),
        (None, {"add_bos_token": True}, None, False),
    ],
)
def test_bos(tmp_path, processor, config, bos, adds):
    vocabulary = read(tmp_path, changed(post_processor=processor), tokenizer_config=config)
    assert (vocabulary.bos_id, vocabulary.add_bos) == (bos, adds)


def test_eos(tmp_path):
    assert read(tmp_path).eos_ids == ()
    assert read(tmp_path, special_tokens_map={"eos_token": {"content": "<|im_end|>"}}).eos_ids == (2,)
    assert read(tmp_path, tokenizer_config={"eos_token": "<|endoftext|>"}).eos_ids == (0,)


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        (changed(normalizer={"type": "NFC"}), "the normalizer NFC is not supported"),
        (changed(pre_tokenizer={"type": "Whitespace"}), "the pre-tokenizer Whitespace is not supported"),
        (changed(model={"type": "WordPiece"}), "the model is WordPiece; expected byte-level BPE"),
        (changed(model={"type": "Unigram", "vocab": [["a", 0.0]]}), "the model is Unigram"),
        (SMALL | {"model": 5}, "the model is 5"),
        (changed(model={"dropout": 0.1}), "the model has dropout 0.1"),
        (changed(model={"byte_fallback": True}), "the model has byte_fallback True"),
        (changed(model={"end_of_word_suffix": "</w>"}), "the model has end_of_word_suffix '</w>'"),
        (changed(model={"merges": [["x", "yyyy"]]}), "a merge makes 'xyyyy', which is not in the vocabulary"),
        (changed(model={"merges": []}), "the vocabulary has no merges"),
        (
            changed(model={"ignore_merges": True, "vocab": SMALL["model"]["vocab"] | {"xyzzy": 999}}),
            "no merge makes the token 'xyzzy'",
        ),
        (changed(added_tokens=[{"id": 999, "content": "<m>", "lstrip": True}]), "the added token '<m>' has lstrip"),
        ([1, 2], "expected a JSON object, found list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_parts_are_one_line_errors(tmp_path, document, fault):
    with pytest.raises(UserError, match=f"tokenizer.json: {fault}") as caught:
        read(tmp_path, document)
    assert "\n" not in str(caught.value)


def test_damaged_json_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab"')
    with pytest.raises(UserError, match="tokenizer.json is not JSON"):
        Vocabulary.from_tokenizer_json(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("document", "part"),
    [
        (changed(added_tokens=5), "added_tokens"),
        (changed(added_tokens=[5]), "added_tokens"),
        (changed(added_tokens=[{"id": 1}]), "added_tokens"),
        (changed(added_tokens=[{"content": "<x>"}]), "added_tokens"),
        (changed(added_tokens=[{"content": "<x>", "id": -1}]), "added_tokens"),
        (changed(added_tokens=[{"content": "<x>", "id": 10**9}]), "added_tokens"),  # a list of a billion entries
        (changed(normalizer="NFC"), "normalizer"),
        (changed(pre_tokenizer=[1]), "pre_tokenizer"),
        (changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [None]}), "pre_tokenizer"),
        (changed(post_processor="x"), "post_processor"),
        (changed(post_processor={"processors": 5}), "post_processor"),
        (changed(post_processor={"single": [5]}), "post_processor"),
        (changed(post_processor={"single": [{"SpecialToken": {"id": [1]}}]}), "post_processor"),
        (changed(model={"vocab": {}}), "model.vocab"),
        (changed(model={"vocab": SMALL["model"]["vocab"] | {"a": "b"}}), "model.vocab"),
        (changed(model={"vocab": SMALL["model"]["vocab"] | {"a": -1}}), "model.vocab"),
        (changed(model={"merges": None}), "model.merges"),
        (changed(model={"merges": ["t h", 5]}), "model.merges"),
        (changed(model={"merges": [["t"]]}), "model.merges"),
        (changed(model={"merges": [["t", 5]]}), "model.merges"),
        (changed(model={"unk_token": []}), "model.unk_token"),
    ],
)
def test_malformed_parts_are_named(tmp_path, document, part):
    with pytest.raises(UserError, match=f"tokenizer.json: {part} is not in the form of the library"):
        read(tmp_path, document)


@pytest.mark.parametrize("entries", [5, {"x": {"content": "a"}}, {"1": 5}, {"1": {}}, {"99999999": {"content": "a"}}])
def test_malformed_added_tokens_of_the_configuration_are_named(tmp_path, entries):
    with pytest.raises(UserError, match="tokenizer_config.json: added_tokens_decoder is not in the form"):
        read(tmp_path, tokenizer_config={"added_tokens_decoder": entries})


# --- with Meta's tokenizer.model in the same folder ------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama3_document():
    """The document of a Llama 3 folder, with the special tokens of 3.0."""
    ranks = read_ranks(META_MODEL)
    names = special_tokens("3.0")
    return SMALL | {
        "added_tokens": [{"id": n, "content": name, "special": True} for name, n in names.items()],
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {to_text(token): rank for token, rank in ranks.items()},
            "merges": to_merges(ranks),
        },
    }


def test_ranks_of_tokenizer_model_replace_parsing(tmp_path, llama3_document, monkeypatch):
    alone = read(tmp_path, llama3_document)
    shutil.copy(META_MODEL, tmp_path / "tokenizer.model")
    monkeypatch.setattr(tokenizer_json, "_parse", None)
    both = read(tmp_path, llama3_document)
    assert both.ranks == alone.ranks == read_ranks(META_MODEL)
    assert list(both.tokens) == list(alone.tokens)
    assert both.special == alone.special == special_tokens("3.0")
    assert both.pre_tokenizer is LLAMA3


def test_a_tokenizer_model_that_disagrees_is_ignored(tmp_path, llama3_document):
    shutil.copy(META_MODEL, tmp_path / "tokenizer.model")
    assert read(tmp_path).ranks.keys() != read_ranks(META_MODEL).keys()
    swapped = dict(llama3_document["model"]["vocab"])
    last, other = list(swapped)[-1:-3:-1]
    swapped[last], swapped[other] = swapped[other], swapped[last]
    vocabulary = read(tmp_path, llama3_document | {"model": llama3_document["model"] | {"vocab": swapped}})
    assert to_text(vocabulary.tokens[127998]) == last
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    assert len(read(tmp_path).tokens) == len(SMALL["model"]["vocab"]) + 1


def test_texts_with_ranks_of_tokenizer_model(tmp_path, llama3_document, llama30):
    shutil.copy(META_MODEL, tmp_path / "tokenizer.model")
    tokenizer = Tokenizer(read(tmp_path, llama3_document))
    for text in TEXTS:
        assert tokenizer.encode(text, allow_special=True) == llama30.encode(text, allow_special=True)
