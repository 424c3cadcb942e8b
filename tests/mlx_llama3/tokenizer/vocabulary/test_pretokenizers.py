import json

import pytest
import regex
from hypothesis import given, strategies as st
from tokenizer_samples import small_bpe, texts

from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.vocabulary.byte_level import to_bytes
from mlx_llama3.tokenizer.vocabulary.pretokenizers import DIGITS_GPT2, GPT2, KNOWN, LLAMA3, from_gguf, from_hugging_face

RULES = {"llama3": LLAMA3, "gpt2": GPT2, "smollm": DIGITS_GPT2}
PEERS = {kind: small_bpe(kind, vocab_size=260) for kind in RULES}


def split_by_the_library(kind, text):
    return b"\0".join(to_bytes([piece for piece, _ in PEERS[kind].pre_tokenizer.pre_tokenize_str(text)]))


def split_by_pattern(kind, text):
    # tiktoken's patterns are written in the dialect of `regex`; test_tokenizer compares the ids themselves. Unlike
    # tiktoken and the library `tokenizers`, `regex` counts some unassigned characters as letters.
    return b"\0".join(piece.encode() for piece in regex.findall(RULES[kind].pattern, text))


@pytest.mark.parametrize("kind", RULES)
@given(text=texts(st.characters(exclude_categories=["Cs", "Cn"])))
def test_one_pattern_splits_like_the_steps_of_the_library(kind, text):
    assert split_by_pattern(kind, text) == split_by_the_library(kind, text)


def test_white_space_before_a_digit_is_a_piece_of_its_own():
    assert split_by_pattern("smollm", "a  1") == b"a\0  \x001"
    assert split_by_pattern("smollm", "a  b") == b"a\0 \0 b"
    assert split_by_pattern("gpt2", "a  1") == b"a\0 \0 1"


@pytest.mark.parametrize("kind", RULES)
def test_read_from_tokenizer_json(kind):
    written = json.loads(PEERS[kind].to_str())["pre_tokenizer"]
    assert from_hugging_face(written, "here") is RULES[kind]
    if len(written["pretokenizers"]) == 1:
        assert from_hugging_face(written["pretokenizers"][0], "here") is RULES[kind]


def test_older_files_leave_use_regex_out():
    assert from_hugging_face({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}, "here") is GPT2


@pytest.mark.parametrize(
    ("written", "named"),
    [
        (None, "none"),
        ({"type": "Metaspace", "replacement": "_"}, r"Metaspace \(replacement _\)"),
        ({"type": "ByteLevel", "add_prefix_space": True}, r"ByteLevel \(add_prefix_space True\)"),
        ({"type": "Sequence", "pretokenizers": [{"type": "Punctuation"}, {"type": "Digits"}]}, "Punctuation.*Digits"),
        (
            {
                "type": "Sequence",
                "pretokenizers": [{"type": "Split", "pattern": {"Regex": r"\p{N}"}}, {"type": "ByteLevel"}],
            },
            r"Split \(pattern .*\) \+ ByteLevel",
        ),
    ],
)
def test_others_are_refused_by_name(written, named):
    with pytest.raises(UserError, match=f"^file: the pre-tokenizer {named}.* is not supported") as caught:
        from_hugging_face(written, "file")
    assert "\n" not in str(caught.value)


def test_names_of_gguf():
    expected = {
        "llama-bpe": LLAMA3,
        "llama3": LLAMA3,
        "llama-v3": LLAMA3,
        "smaug-bpe": LLAMA3,
        "smollm": DIGITS_GPT2,
        "gpt-2": GPT2,
    }
    assert {name: from_gguf(name, "file") for name in expected} == expected
    assert sum(len(known.gguf) for known in KNOWN) == len(expected)
    with pytest.raises(UserError, match="file: the pre-tokenizer 'qwen2'"):
        from_gguf("qwen2", "file")
