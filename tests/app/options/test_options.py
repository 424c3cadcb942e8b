"""The shared options: how they are read on the command line and by `/set`, and what is refused."""

import math
from argparse import ArgumentTypeError

import pytest

from app.cli import Parser
from app.options.options import SETTINGS, add_sampling_options, given_settings
from mlx_llama3.errors import UserError


def parse(*words: str) -> dict:
    parser = Parser(prog="test")
    add_sampling_options(parser, max_tokens=9)
    return given_settings(parser.parse_args(words))


def test_only_what_is_given_is_set() -> None:
    assert parse() == {}
    assert parse("--temp", "0.5", "--top-k", "40") == {"temperature": 0.5, "top_k": 40}


def test_every_setting_has_its_option() -> None:
    words = {"logit_bias": "1:2", "stop": "END", "seed": "1", "max_tokens": "1", "top_k": "1"}
    for name in SETTINGS:
        assert name in parse("--" + name.replace("_", "-"), words.get(name, "1.0"))


def test_repeated_options_are_joined() -> None:
    got = parse("--logit-bias", "1:2.5,3:-inf", "--logit-bias", "4:-1", "--stop", "END", "--stop", "\n\n")
    assert got == {"logit_bias": {1: 2.5, 3: -math.inf, 4: -1.0}, "stop": ["END", "\n\n"]}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--temperature", "-1"], "--temperature is -1.0; it must be a number from 0 (greedy) to 1e+30"),
        (["--top-p", "1.5"], "--top-p is 1.5; it must be a number from 0 to 1"),
        (["--top-k", "-2"], "--top-k is -2"),
        (["--min-p", "nan"], "--min-p is nan"),
        (["--repetition-penalty", "0"], "--repetition-penalty is 0.0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--logit-bias", "1:inf"], "--logit-bias 1:inf"),
    ],
)
def test_values_out_of_range(words, complaint) -> None:
    with pytest.raises(UserError) as caught:
        parse(*words)
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("temperature", "warm", "'warm' is not a number"),
        ("top_k", "1.5", "'1.5' is not a whole number"),
        ("max_tokens", "0", "0 is less than 1"),
        ("logit_bias", "5", "'5' is not ID:BIAS"),
        ("logit_bias", "a:1", "'a' is not a whole number"),
        ("stop", "", "the stop string is empty"),
        ("stop", "\udcff", "it is not UTF-8 at character 1"),
    ],
)
def test_what_cannot_be_read(name, text, complaint) -> None:
    with pytest.raises(ArgumentTypeError, match=complaint):
        SETTINGS[name].parse(text)
