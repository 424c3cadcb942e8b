"""A KV cache with the token ids that it holds, so that a prompt with the same start feeds only its new tokens."""

from collections.abc import Sequence

from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.settings import DEFAULT, CacheSettings


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the longest common prefix of two sequences of token ids."""
    limit = min(len(first), len(second))
    return next((i for i in range(limit) if first[i] != second[i]), limit)


class PrefixCache:
    """The cache of one conversation or prompt.

    `layers` comes from `Transformer.make_cache(settings)`, empty. `ids` are the token ids whose positions it holds.
    """

    def __init__(self, layers: list[KVCache], settings: CacheSettings = DEFAULT) -> None:
        self.layers, self.settings = layers, settings
        self.ids: list[int] = []

    def reuse(self, ids: Sequence[int]) -> list[int]:
        """Trim the cache to its common prefix with `ids`; return the ids that are still to be fed.

        The last id is always among them, because its logits give the next token.
        """
        self.truncate(common_length(self.ids, ids[:-1]))
        return list(ids[len(self.ids) :])

    def set_ids(self, ids: Sequence[int]) -> None:
        """Record after a generation that the cache holds the start of `ids`; drop positions beyond them.

        A stopped generation may have fed a token that was not returned, or not all of `ids`. If it was interrupted
        inside a step, the layers have different lengths, and the shortest counts.
        """
        self.ids = list(ids)
        self.truncate(min(len(ids), *(layer.offset for layer in self.layers)))

    def truncate(self, length: int) -> None:
        """Drop all positions from `length` on; a cache with a window may have to drop more.

        Does nothing if the cache is not longer than `length`.
        """
        length = min(length, len(self.ids))
        while (shorter := min(layer.trimmable_to(length) for layer in self.layers)) < length:
            length = shorter
        self.ids = self.ids[:length]
        for layer in self.layers:
            layer.trim(layer.offset - length)
