from tokenizers.pre_tokenizers import ByteLevel

from mlx_llama3.tokenizer.vocabulary.byte_level import ALPHABET, to_bytes, to_text


def test_alphabet_is_that_of_the_library():
    assert len(ALPHABET) == 256
    assert set(ALPHABET) == set(ByteLevel.alphabet())
    for character in "aé日😀 \n\x00":
        [(written, _)] = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)
        assert to_text(character.encode()) == written


def test_both_ways():
    tokens = [bytes([byte]) for byte in range(256)] + [bytes(range(256)), b"", b"\n\n", "日本".encode()]
    assert to_bytes([to_text(token) for token in tokens]) == tokens
    assert to_bytes([]) == []


def test_other_characters_are_plain_text():
    # U+2000 is the separator with which `to_bytes` joins tokens; the space is written `Ġ` in the alphabet.
    assert to_bytes(["Ġa", "<｜User｜>", "a\u2000b", "a b", "Ċ"]) == [
        b" a",
        "<｜User｜>".encode(),
        "a\u2000b".encode(),
        b"a b",
        b"\n",
    ]
