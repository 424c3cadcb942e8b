"""Convert merge lists (Hugging Face, GGUF) to ranks (tiktoken), and back.

A merge list names pairs, a rank list only their results: tiktoken merges any two neighbours whose concatenated bytes
are a token, lowest rank first. Both give the same ids if all merges that make a token are consecutive in the list,
which is checked. The reason: merges between two fixed boundaries do not depend on the text outside them, so when a
token's rank is reached, its bytes are always split into the two parts that its merge names.
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
        merges: "left right", or (left, right), highest priority first.
        tokens: id -> bytes.
        source: the file's name in errors.

    Returns:
        bytes -> rank; and rank -> id, or None if every rank is its id. A byte without a token gets an id past the last
        one. Tokens that no merge makes are left out, because no text gives them.

    Raises:
        UserError: the result of a merge is not in the vocabulary; the merges of a token are not consecutive.
    """
    merged = ["".join(merge).replace(" ", "") for merge in merges]
    try:
        results = [words[word] for word in merged]
    except KeyError as error:
        raise UserError(f"{source}: a merge makes {error.args[0]!r}, which is not in the vocabulary") from None
    if not results:
        raise UserError(f"{source}: the vocabulary has no merges; expected byte-level BPE")
    merged_ids = [n for n, _ in groupby(results)]  # one entry for consecutive merges with the same result
    byte_ids = [words.get(character) for character in ALPHABET]
    missing = [byte for byte, n in enumerate(byte_ids) if n is None]
    beyond = {bytes([byte]): len(tokens) + count for count, byte in enumerate(missing)}
    present = [n for n in byte_ids if n is not None]
    if all(a < b for a, b in pairwise(merged_ids)):
        return {tokens[n]: n for n in (*present, *merged_ids)} | beyond, None
    if len(set(merged_ids)) < len(merged_ids):
        raise UserError(f"{source}: a token is made at two places of the merges; such a list cannot be ranked")
    ids = [*present, *merged_ids, *beyond.values()]
    return {token: rank for rank, token in enumerate([*(tokens[n] for n in present + merged_ids), *beyond])}, ids


def to_merges(ranks: Mapping[bytes, int]) -> list[str]:
    """The merges that give the ids of these ranks: every pair of tokens whose result is a token, in rank order.

    There are 280,147 for the 128,000 ranks of Llama 3.
    """
    written = {token: to_text(token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:n], token[n:]) for n in range(1, len(token))]
        known = [(ranks[left], ranks[right], left, right) for left, right in pairs if left in ranks and right in ranks]
        merges += [f"{written[left]} {written[right]}" for _, _, left, right in sorted(known)]
    return merges
