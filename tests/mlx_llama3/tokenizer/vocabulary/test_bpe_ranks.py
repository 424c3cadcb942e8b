import json

import pytest
from tokenizer_samples import small_bpe

from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.vocabulary.bpe_ranks import to_merges, to_ranks
from mlx_llama3.tokenizer.vocabulary.byte_level import to_bytes, to_text

LETTERS = {"a": 0, "b": 1, "c": 2}


def ranked(words, merges):
    tokens = [b""] * (max(words.values()) + 1)
    for word, n in words.items():
        tokens[n] = word.encode()
    return to_ranks(words, merges, tokens, "here")


def test_ranks_are_ids_where_ids_follow_the_merges():
    ranks, ids = ranked(LETTERS | {"ab": 3, "abc": 4}, ["a b", "ab c"])
    assert ids is None
    assert {token: ranks[token] for token in (b"a", b"b", b"c", b"ab", b"abc")} == {
        b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"abc": 4
    }  # fmt: skip
    assert set(ranks) >= {bytes([byte]) for byte in range(256)}
    assert ranks[b"z"] >= 5  # no token: past the last id


def test_ids_out_of_order_are_ranked_by_the_merges():
    ranks, ids = ranked(LETTERS | {"ab": 4, "abc": 3}, [("a", "b"), ("ab", "c")])
    assert ranks[b"ab"] < ranks[b"abc"]
    assert [ids[ranks[token]] for token in (b"a", b"b", b"c", b"ab", b"abc")] == [0, 1, 2, 4, 3]
    assert ids[ranks[b"z"]] >= 5


def test_tokens_that_no_merge_makes_are_left_out():
    ranks, _ = ranked(LETTERS | {"ab": 3, "cc": 4}, ["a b"])
    assert b"cc" not in ranks


@pytest.mark.parametrize(
    ("words", "merges", "fault"),
    [
        (LETTERS | {"ab": 3}, ["a b", "b c"], "a merge makes 'bc', which is not in the vocabulary"),
        (LETTERS | {"ab": 3}, [], "has no merges"),
        (LETTERS | {"aab": 3, "ab": 4}, ["a ab", "a b", "aa b"], "made at two places"),
    ],
)
def test_merges_that_do_not_fit_are_refused(words, merges, fault):
    with pytest.raises(UserError, match=fault):
        ranked(words, merges)


def test_merges_from_ranks_and_back():
    model = json.loads(small_bpe().to_str())["model"]
    ranks, _ = to_ranks(model["vocab"], model["merges"], _tokens(model["vocab"]), "here")
    merges = to_merges(ranks)
    # The trained merges name one pair for each token. Ranks allow every pair, including the trained one, in this order.
    assert {" ".join(pair) for pair in model["merges"]} <= set(merges)
    again, ids = to_ranks(model["vocab"], merges, _tokens(model["vocab"]), "here")
    assert (again, ids) == (ranks, None)


def _tokens(words):
    tokens = dict(zip(words.values(), to_bytes(list(words)), strict=True))
    assert all(to_text(tokens[n]) == word for word, n in words.items())
    return [tokens[n] for n in range(len(tokens))]
