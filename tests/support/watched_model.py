"""A tiny random model that counts the positions it is fed, and whose replies can be given."""

from typing import Any

from tiny_models import tiny_args

from mlx_llama3.model.transformer import Transformer

import mlx.core as mx


class WatchedModel(Transformer):
    """prompts: the number of positions fed for each prompt.

    replies: the token ids to generate after each of the next prompts. After the end of one, and without any, the logits
    are the random model's.
    """

    def __init__(self, **changes: Any) -> None:
        mx.random.seed(5)
        super().__init__(tiny_args(**changes))
        self.prompts: list[int] = []
        self.replies: list[list[int]] = []
        self._pending = self._end = self._start = 0
        self._script: list[int] = []

    def residual(self, tokens: mx.array, start_pos: int = 0, cache: list | None = None) -> mx.array:
        self._pending += tokens.shape[1]
        self._end = start_pos + tokens.shape[1]
        return super().residual(tokens, start_pos, cache)

    def head(self, x: mx.array) -> mx.array:
        logits = super().head(x)
        if logits.ndim == 2:  # `prefill` passes the last position of a prompt like this
            self.prompts.append(self._pending)
            self._start, self._script = self._end, self.replies.pop(0) if self.replies else []
        self._pending = 0
        index = self._end - self._start
        if logits.ndim == 3 and logits.shape[1] > 1:  # over a draft: the logits after each position
            rows = range(logits.shape[1])
            return mx.stack([self._scripted(logits[:, row], index - rows[-1] + row) for row in rows], axis=1)
        return self._scripted(logits, index)

    def _scripted(self, logits: mx.array, index: int) -> mx.array:
        if index < len(self._script):
            return mx.where(mx.arange(logits.shape[-1]) == self._script[index], 1e4, logits)
        return logits

    def plain_logits(self, ids: list[int]) -> mx.array:
        """Logits (vocab,) after `ids` from one pass without a cache, neither counted nor scripted."""
        return super().head(super().residual(mx.array([ids])))[0, -1]
