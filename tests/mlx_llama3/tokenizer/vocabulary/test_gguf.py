import json
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from tokenizer_samples import META_MODEL, SMOLLM_MISSING, TEXTS, small_bpe, texts

from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.tokenizer import Tokenizer
from mlx_llama3.tokenizer.vocabulary.bpe_ranks import to_merges
from mlx_llama3.tokenizer.vocabulary.byte_level import to_text
from mlx_llama3.tokenizer.vocabulary.pretokenizers import DIGITS_GPT2, LLAMA3
from mlx_llama3.tokenizer.vocabulary.vocabulary import Vocabulary

import mlx.core as mx

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5


def metadata_of(peer, pre, **others):
    """The metadata that llama.cpp's converter writes for a tokenizer of the library `tokenizers`."""
    document = json.loads(peer.to_str())
    added = {entry["id"]: entry for entry in document["added_tokens"]}
    names = sorted(peer.get_vocab(), key=peer.get_vocab().__getitem__)
    kinds = [(CONTROL if added[n]["special"] else USER_DEFINED) if n in added else NORMAL for n in range(len(names))]
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": names,
        "token_type": kinds,
        "merges": [" ".join(pair) for pair in document["model"]["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
        **others,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


PEERS = {
    "smollm": small_bpe("smollm", missing=SMOLLM_MISSING),
    "llama-bpe": small_bpe("llama3"),
    "gpt-2": small_bpe("gpt2"),
}
TOKENIZERS = {pre: Tokenizer(Vocabulary.from_gguf(metadata_of(peer, pre))) for pre, peer in PEERS.items()}


@pytest.fixture(scope="module")
def llama3_metadata(llama31):
    vocabulary = llama31.vocabulary
    special = set(vocabulary.special.values())
    names = [t.decode() if n in special else to_text(t) for n, t in enumerate(vocabulary.tokens)]
    keys = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": names,
        "merges": to_merges(vocabulary.ranks),
        "token_type": [CONTROL if n in special else NORMAL for n in range(len(names))],
        "bos_token_id": 128000,
        "eos_token_id": 128009,
    }
    return MappingProxyType({f"tokenizer.ggml.{key}": value for key, value in keys.items()})


@pytest.mark.parametrize("pre", PEERS)
@given(text=texts())
def test_ids_are_those_of_the_library(pre, text):
    if pre == "smollm":  # these bytes are dropped, see test_bytes_that_are_no_token
        text = text.encode().translate(None, SMOLLM_MISSING).decode(errors="replace")
    assert TOKENIZERS[pre].encode(text) == _plain_ids(PEERS[pre], text)


def _plain_ids(peer, text):
    peer.encode_special_tokens = True
    return peer.encode(text, add_special_tokens=False).ids


def test_bytes_that_are_no_token():
    tokenizer = TOKENIZERS["smollm"]
    assert b"\x04" not in tokenizer.vocabulary.tokens
    # Not tested inside a run of punctuation, where the library merges its left and right neighbours.
    for text in ("a\x04b", "\x04", "the \U00050000 cat", "x \x04 1", "\x1d\x1d\n\x06"):
        assert tokenizer.encode(text) == _plain_ids(PEERS["smollm"], text)
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"


def test_the_parts(demo_gguf):
    loaded, metadata = mx.load(str(demo_gguf), return_metadata=True)
    del loaded
    vocabulary = Vocabulary.from_gguf(metadata, str(demo_gguf))
    assert len(vocabulary.tokens) == 49152
    assert vocabulary.tokens[0:2] == [b"<|endoftext|>", b"<|im_start|>"]
    assert vocabulary.tokens[253] == b" a"
    assert (vocabulary.bos_id, vocabulary.eos_ids, vocabulary.add_bos) == (1, (2,), False)
    assert len(vocabulary.special) == 17
    assert vocabulary.added == {}
    assert vocabulary.pre_tokenizer is DIGITS_GPT2
    assert vocabulary.merges[0] == "Ġ t"


def test_numbers_may_be_arrays():
    metadata = metadata_of(PEERS["smollm"], "smollm")
    kinds = metadata["tokenizer.ggml.token_type"]
    arrays = metadata | {
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": mx.array(1, mx.uint32),
        "tokenizer.ggml.add_bos_token": mx.array(False),
    }
    vocabulary = Vocabulary.from_gguf(arrays)
    assert vocabulary.bos_id == 1
    assert vocabulary.add_bos is False
    assert vocabulary.special == TOKENIZERS["smollm"].vocabulary.special


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"pre": "llama3"},
        {"pre": "llama-v3"},
        {"pre": "smaug-bpe"},
        {"pre": None},
        {"pre": "default"},
        {"model": "llama"},
        {"model": "llama", "pre": "smaug-bpe"},
        {"token_type": None},
    ],
    ids=str,
)
def test_llama3_is_the_same_from_a_gguf(llama3_metadata, llama31, change):
    changed = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    metadata = {key: value for key, value in {**llama3_metadata, **changed}.items() if value is not None}
    vocabulary = Vocabulary.from_gguf(metadata)
    assert vocabulary.ranks == llama31.vocabulary.ranks
    assert vocabulary.special == llama31.vocabulary.special
    assert list(vocabulary.tokens) == list(llama31.vocabulary.tokens)
    assert vocabulary.pre_tokenizer is LLAMA3
    assert vocabulary.add_bos  # llama.cpp's default for this pre-tokenizer
    assert (vocabulary.bos_id, vocabulary.eos_ids) == (128000, (128009,))


def test_ends_of_turn_and_message_count_as_ends():
    metadata = metadata_of(PEERS["gpt-2"], "gpt-2", eot_token_id=2, eom_token_id=0)
    assert Vocabulary.from_gguf(metadata).eos_ids == (2, 0)


def test_kinds_of_tokens():
    peer = PEERS["gpt-2"]
    metadata = metadata_of(peer, "gpt-2")
    names, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    more = {"<unk>": UNKNOWN, "<｜User｜>": USER_DEFINED, "<tool>": USER_DEFINED, "<|late|>": NORMAL, "[PAD9]": UNUSED}
    metadata["tokenizer.ggml.tokens"] = [*names, *more]
    metadata["tokenizer.ggml.token_type"] = [*kinds, *more.values()]
    vocabulary, n = Vocabulary.from_gguf(metadata), len(names)
    assert vocabulary.special == TOKENIZERS["gpt-2"].vocabulary.special | {
        "<unk>": n,
        "<｜User｜>": n + 1,
        "<|late|>": n + 3,
    }
    assert vocabulary.added == TOKENIZERS["gpt-2"].vocabulary.added | {"<tool>": n + 2}
    assert vocabulary.tokens[n:] == [b"<unk>", "<｜User｜>".encode(), b"<tool>", b"<|late|>", b""]


SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x00>", "▁", "▁the"],
    "tokenizer.ggml.scores": [0.0] * 6,
    "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1],
}


@pytest.mark.parametrize(
    ("metadata", "fault"),
    [
        ({}, r"holds no vocabulary \(tokenizer.ggml.tokens\)"),
        (SENTENCEPIECE, r"the vocabulary is SentencePiece, as of Llama 1 and 2 \(tokenizer.ggml.model\)"),
        (SENTENCEPIECE | {"tokenizer.ggml.merges": ["▁ the"]}, "the vocabulary is SentencePiece"),
        (metadata_of(PEERS["gpt-2"], "gpt-2", model="bert"), "the vocabulary is 'bert'"),
        (metadata_of(PEERS["gpt-2"], "gpt-2", model=None), "the vocabulary is None"),
        (metadata_of(PEERS["gpt-2"], "gpt-2", merges=None), "holds no merges"),
        (metadata_of(PEERS["gpt-2"], "qwen2"), r"the pre-tokenizer 'qwen2' \(tokenizer.ggml.pre\) is not supported"),
        (metadata_of(PEERS["gpt-2"], None), "the pre-tokenizer 'None'"),
        (metadata_of(PEERS["gpt-2"], "gpt-2", token_type=[1]), "token_type has 1 entries for"),
        (
            metadata_of(PEERS["gpt-2"], "gpt-2", merges=["x yyyy"]),
            "a merge makes 'xyyyy', which is not in the vocabulary",
        ),
        (metadata_of(PEERS["gpt-2"], "gpt-2", eos_token_id=99999), "eos_token_id is 99999; there are"),
        (metadata_of(PEERS["gpt-2"], "gpt-2", eos_token_id="x"), "eos_token_id is 'x'; there are"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of texts"),
        ({"tokenizer.ggml.tokens": 5}, "tokenizer.ggml.tokens must be a list of texts"),
        (metadata_of(PEERS["gpt-2"], "gpt-2", merges=[5]), "tokenizer.ggml.merges must be a list of texts"),
        (metadata_of(PEERS["gpt-2"], "gpt-2", token_type=["1"]), "token_type must be a list of integers"),
    ],
)
def test_other_vocabularies_are_one_line_errors(metadata, fault):
    with pytest.raises(UserError, match=f"^some.gguf: .*{fault}") as caught:
        Vocabulary.from_gguf(metadata, "some.gguf")
    assert "\n" not in str(caught.value)


def test_meta_file_and_gguf_give_the_same_ids(llama3_metadata, llama31):
    tokenizer = Tokenizer(Vocabulary.from_gguf(llama3_metadata))
    assert META_MODEL.exists()
    for text in TEXTS:
        assert tokenizer.encode(text) == llama31.encode(text)
