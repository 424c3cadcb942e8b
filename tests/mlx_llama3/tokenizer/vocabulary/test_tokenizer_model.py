import base64

import pytest
from llama_models.llama3.tokenizer import Tokenizer as MetaTokenizer
from tokenizer_samples import META_MODEL

from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.vocabulary.tokenizer_model import llama3_version, read_ranks, special_tokens


def test_ranks_are_those_of_meta():
    assert read_ranks(META_MODEL) == MetaTokenizer.get_instance().model._mergeable_ranks


def test_special_tokens_of_3_1_are_those_of_meta():
    assert special_tokens("3.1") == MetaTokenizer.get_instance().special_tokens


def test_special_tokens_of_3_0():
    # Meta llama3/tokenizer.py, commit of the first release: ten named by hand, then reserved ones from number 5 on.
    first = [
        "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
        "<|reserved_special_token_2|>", "<|reserved_special_token_3|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|reserved_special_token_4|>", "<|eot_id|>",
    ]  # fmt: skip
    names = first + [f"<|reserved_special_token_{n}|>" for n in range(5, 251)]
    assert special_tokens("3.0") == {name: 128000 + n for n, name in enumerate(names)}


@pytest.mark.parametrize(
    ("config", "version"),
    [
        ({"use_scaled_rope": True}, "3.1"),
        ({"use_scaled_rope": False}, "3.0"),
        ({"rope_theta": 500000.0}, "3.0"),
        ({"rope_theta": 500000.0, "rope_scaling": None}, "3.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "3.1"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "3.1"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, "3.0"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0}}, "3.1"),
    ],
)
def test_version_by_the_configuration(config, version):
    assert llama3_version(config) == version


def test_sentencepiece_is_refused(tmp_path):
    import sentencepiece

    (tmp_path / "corpus.txt").write_text("the cat sat on the mat\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=15, minloglevel=2
    )
    with pytest.raises(
        UserError, match=r"tokenizer.model: this is a SentencePiece model, as of Llama 1 and 2"
    ) as caught:
        read_ranks(tmp_path / "tokenizer.model")
    assert "\n" not in str(caught.value)


_LINES = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)] + [b"YWI= 256\n"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"".join(_LINES)[:-5],
        b"".join(_LINES[1:]),
        b"".join(_LINES[:99] + _LINES[100:]),
        b"abc def\n",
        b"\xff\xfe 0",
    ],
    ids=["empty", "cut off", "first rank missing", "one byte missing", "no number", "no base64"],
)
def test_damaged_files_are_refused(tmp_path, data):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(UserError, match=r"tokenizer.model: expected .*; fetch the file again"):
        read_ranks(tmp_path / "tokenizer.model")


def test_a_whole_small_file(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"".join(_LINES))
    ranks = read_ranks(tmp_path / "tokenizer.model")
    assert ranks == {bytes([byte]): byte for byte in range(256)} | {b"ab": 256}
