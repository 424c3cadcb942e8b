"""Merge lists (Hugging Face, GGUF) to ranks (tiktoken), and back.

A merge list names pairs, a rank list only what they make: tiktoken merges any two neighbours whose bytes together are
a token, lowest rank first. Both give the same ids if every token is made in one stretch of the list, which is checked:
what lies between two fixed borders does not depend on what lies outside, so when a token's turn comes, its bytes are
always in the two parts that its merge names.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.vocabulary.byte_level import ALPHABET, to_text


def to_ranks(
    words: Mapping[str, int], merges: Sequence[str | Sequence[str]], tokens: Sequence[bytes], source: str
) -> tuple[dict[bytes, int], list[int] | None]:
    """Ranks from a vocabulary and its merges.

    Args:
        words: token in the byte alphabet -> id.
        merges: "left right", or (left, right), best first.
        tokens: id -> bytes.
        source: named in errors.

    Returns:
        bytes -> rank, and rank -> id, or None where ranks are ids. A byte that is no token gets an id past the last
        one. Tokens that no merge makes are left out: no text gives them.

    Raises:
        UserError: a merge whose result is not in the vocabulary; a token that is made at two places of the list.
    """
    made = ["".join(merge).replace(" ", "") for merge in merges]
    try:
        results = [words[word] for word in made]
    except KeyError as error:
        raise UserError(f"{source}: a merge makes {error.args[0]!r}, which is not in the vocabulary") from None
    if not results:
        raise UserError(f"{source}: the vocabulary has no merges; expected byte-level BPE")
    stretches = [n for n, _ in groupby(results)]
    bytes_ = [words.get(character) for character in ALPHABET]
    missing = [byte for byte, n in enumerate(bytes_) if n is None]
    beyond = {bytes([byte]): len(tokens) + count for count, byte in enumerate(missing)}
    present = [n for n in bytes_ if n is not None]
    if all(a < b for a, b in pairwise(stretches)):
        return {tokens[n]: n for n in (*present, *stretches)} | beyond, None
    if len(set(stretches)) < len(stretches):
        raise UserError(f"{source}: a token is made at two places of the merges; such a list cannot be ranked")
    ids = [*present, *stretches, *beyond.values()]
    return {token: rank for rank, token in enumerate([*(tokens[n] for n in present + stretches), *beyond])}, ids


def to_merges(ranks: Mapping[bytes, int]) -> list[str]:
    """The merges that give the ids of these ranks: every way to make a token of two others, in the order of ranks.

    280,147 for the 128,000 ranks of Llama 3.
    """
    written = {token: to_text(token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:n], token[n:]) for n in range(1, len(token))]
        known = [(ranks[left], ranks[right], left, right) for left, right in pairs if left in ranks and right in ranks]
        merges += [f"{written[left]} {written[right]}" for _, _, left, right in sorted(known)]
    return merges
