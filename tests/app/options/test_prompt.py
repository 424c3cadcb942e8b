"""Prompts of commands that run once, with the tokenizer of Llama 3, which puts a BOS before every text."""

from argparse import ArgumentParser

import pytest
from tokenizer_samples import META_MODEL

from app.options.options import add_prompt_options
from app.options.prompt import Prompt
from mlx_llama3.tokenizer.tokenizer import Tokenizer
from mlx_llama3.tokenizer.vocabulary.vocabulary import Vocabulary

BOS, HI = 128000, 6151


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(Vocabulary.from_tokenizer_model(META_MODEL))


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (["--raw", "hi"], [BOS, HI]),
        (["--raw", "<|begin_of_text|>hi"], [BOS, HI]),
        (["--prompt", "hi"], [BOS, 128006, 882, 128007, 271, HI, 128009]),
        (["--ids", f"{BOS},{HI}"], [BOS, HI]),
        (["--ids", f"{HI}"], [HI]),  # ids are taken as they are
    ],
)
def test_exactly_one_bos(tokenizer, words, begins) -> None:
    parser = ArgumentParser()
    parser.add_argument("--system")
    add_prompt_options(parser)
    args = parser.parse_args(words)
    ids = Prompt.from_args(args).encode(tokenizer)
    assert ids[: len(begins)] == begins
    assert ids.count(BOS) == begins.count(BOS)
