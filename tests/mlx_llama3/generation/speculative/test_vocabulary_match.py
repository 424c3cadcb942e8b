"""Tokenizers whose ids have the same meaning, and some whose ids do not."""

from dataclasses import replace

import pytest

from mlx_llama3.errors import UserError
from mlx_llama3.generation.speculative.vocabulary_match import check_same_tokens
from mlx_llama3.tokenizer.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def demo(demo_folder):
    return load_tokenizer(demo_folder)


def other(tokenizer: Tokenizer, **changes) -> Tokenizer:
    return Tokenizer(replace(tokenizer.vocabulary, **changes))


def complaint(draft: Tokenizer, tokenizer: Tokenizer) -> str:
    with pytest.raises(UserError) as caught:
        check_same_tokens(draft, tokenizer, "small")
    return str(caught.value)


def test_the_same_and_padding_are_fine(demo, llama31):
    check_same_tokens(demo, demo, "small")
    padded = other(llama31, tokens=[*llama31.vocabulary.tokens, b"", b""])
    check_same_tokens(padded, llama31, "small")
    check_same_tokens(llama31, padded, "small")


def test_families_differ_at_once(demo, llama31):
    assert complaint(llama31, demo) == (
        "small: cannot draft for this model, since token 0 is '!' there and the control token '<|endoftext|>' here; "
        "choose a smaller model of the same family, or ngram"
    )


def test_versions_differ_in_their_control_tokens(llama30, llama31):
    assert "token 128004 is the control token '<|reserved_special_token_2|>' there" in complaint(llama30, llama31)
    assert "and the control token '<|finetune_right_pad_id|>' here" in complaint(llama30, llama31)


def test_one_token_more(llama31):
    longer = other(llama31, tokens=[*llama31.vocabulary.tokens, b"\xf0more"])
    said = f"token {llama31.vocab_size} is '\\\\xf0more' there and unused here"
    assert said in complaint(longer, llama31)
    assert f"token {llama31.vocab_size} is unused there" in complaint(llama31, longer)


def test_a_control_token_that_is_text_in_the_other(llama31):
    special = dict(llama31.vocabulary.special)
    token = special.pop("<|eom_id|>")
    text = other(llama31, special=special, added={"<|eom_id|>": token})
    assert f"token {token} is '<|eom_id|>' there and the control token '<|eom_id|>' here" in complaint(text, llama31)
