"""A model's cache together with the token ids that it holds, so that only what is new needs to be fed."""

from collections.abc import Sequence

from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.settings import DEFAULT, CacheSettings


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    limit = min(len(first), len(second))
    return next((i for i in range(limit) if first[i] != second[i]), limit)


class PrefixCache:
    """The cache of one stream.

    `layers` is what `Transformer.make_cache(settings)` gave, empty; `ids` are the tokens that it holds.
    """

    def __init__(self, layers: list[KVCache], settings: CacheSettings = DEFAULT) -> None:
        self.layers, self.settings = layers, settings
        self.ids: list[int] = []

    def reuse(self, ids: Sequence[int]) -> list[int]:
        """Keep what the cache has in common with the start of `ids`, forget the rest, return the ids still to feed.

        The last id is always among them: its logits are what comes next.
        """
        self.truncate(common_length(self.ids, ids[:-1]))
        return list(ids[len(self.ids) :])

    def set_ids(self, ids: Sequence[int]) -> None:
        """Note after a generation that the cache holds the start of `ids`, and forget what was fed beyond them.

        A generation that was stopped has perhaps fed a token that nobody saw, or fed not all of `ids`. The layers may
        disagree if it was interrupted inside a step; the shortest counts.
        """
        self.ids = list(ids)
        self.truncate(min(len(ids), *(layer.offset for layer in self.layers)))

    def truncate(self, length: int) -> None:
        """Forget all from position `length` on, and what a cache with a window cannot keep without it.

        Nothing, if the cache is shorter.
        """
        length = min(length, len(self.ids))
        while (reached := min(layer.trimmable_to(length) for layer in self.layers)) < length:
            length = reached
        self.ids = self.ids[:length]
        for layer in self.layers:
            layer.trim(layer.offset - length)
