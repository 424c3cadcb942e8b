"""A model whose logits come from a table of the last token, so that every probability is known."""

from types import SimpleNamespace

import mlx.core as mx


class _OffsetCache:
    """A cache that stores only its offset."""

    max_draft = 100

    def __init__(self) -> None:
        self.offset, self.state = 0, []

    def trim(self, count: int) -> None:
        self.offset -= count

    def trimmable_to(self, length: int) -> int:
        return min(length, self.offset)


class TableModel:
    """table: the logits after each token, `(vocab, vocab)`. It has the interface of `Transformer`."""

    def __init__(self, table: mx.array) -> None:
        self.table = table
        self.args = SimpleNamespace(vocab_size=table.shape[0], max_seq_len=10**9, n_heads=1)

    def make_cache(self, *_settings: object) -> list[_OffsetCache]:
        return [_OffsetCache()]

    def residual(self, tokens: mx.array, start_pos: int, cache: list[_OffsetCache]) -> mx.array:
        assert cache[0].offset == start_pos
        cache[0].offset += tokens.shape[1]
        return tokens[..., None]

    def head(self, x: mx.array) -> mx.array:
        return self.table[x[..., 0]]

    def __call__(self, tokens: mx.array, start_pos: int, cache: list[_OffsetCache]) -> mx.array:
        return self.head(self.residual(tokens, start_pos, cache))
