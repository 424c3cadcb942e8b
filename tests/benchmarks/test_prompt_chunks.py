"""The model of a prompt's chunks: counts by hand, and the bound that keeps the default at 512."""

import pytest
from tiny_models import tiny_args

from benchmarks.prompt_chunks import CHUNKS, OPERATIONS_A_BYTE, fixed, pass_bytes, repeated, saving

ARGS = tiny_args(n_layers=2)


def test_the_counts_are_those_by_hand():
    a_token = 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, numbers, bytes
    # Four chunks: each reads 1,000 bytes of weights, and reads and writes a cache of 64 tokens.
    assert repeated(ARGS, 1000, 128, 32) == 4 * (1000 + 2 * 64 * a_token)
    operations = 2 * 128 * 9000 * 8 / 4.5 + 2 * 128 * 128 * 64 * 2  # products, attention
    values = 8 * 64 + 4 * 128 + 2 * 64 + 6 * 96
    assert fixed(ARGS, 9000, 128, 30) == operations / 30 + 128 * 2 * values * 2 + 4 * 64 * a_token
    assert pass_bytes("llama3.2-1b", 512) == 2 * 512 * (2 * 2048 + 3 * 8192)


@pytest.mark.parametrize("alias", ["llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "llama3.3-70b"])
@pytest.mark.parametrize("tokens", [2048, 8192, 32768])
def test_larger_chunks_save_little(alias, tokens):
    """If this fails, the default of `prefill_chunk` is to be chosen anew."""
    shares = {rate: [saving(alias, chunk, rate, tokens) for chunk in CHUNKS] for rate in OPERATIONS_A_BYTE}
    for (none, twice, four_times), most in zip(shares.values(), (0.02, 0.05), strict=True):
        assert none == 0 < twice < four_times < most
