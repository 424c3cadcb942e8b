"""Speculative decoding: one forward pass of the model verifies a draft of several tokens (Leviathan et al. 2023, arXiv
2211.17192; Chen et al. 2023, arXiv 2302.01318).

The output does not depend on the drafts. The token after each drafted position is sampled as without drafts, with the
random key of its position (a seed gives one key per token) and the penalties of the tokens before it. A draft is
accepted up to its first token that differs. So the answer has the model's own distribution, and the same seed gives the
same answer with any drafter or none, whenever drafting is switched on or off. For deterministic drafts (prompt lookup)
this accepts as often as the rejection sampling of the papers. For draft models, which sample with the same random keys,
it accepts almost as often (Daliri et al. 2024, arXiv 2408.07978), with no extra draws.

One limit: a pass over several positions rounds differently from passes over one, by some 1e-5 of a logit in float32.
Where two tokens are closer than that, the other one may be chosen, as with another `prefill_chunk`. An exact tie goes
to the lower id, as always.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlx_llama3.errors import UserError
from mlx_llama3.generation.decoding import TokenChoice, choose
from mlx_llama3.generation.sampling import Sampler
from mlx_llama3.generation.speculative.draft_switch import DraftSwitch
from mlx_llama3.generation.speculative.drafters import Drafter
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx

if TYPE_CHECKING:
    from mlx_llama3.model.hooks.norms import NormCapture

MAX_DRAFT_TOKENS = 32  # a longer draft costs a full matrix product


class Speculation:
    """The speculative decoding of one stream: pass it to `generate` or to a `Conversation`, for all of its answers.

    Args:
        drafter: creates the drafter.
        tokens: the most tokens in one draft, 1 to 32.
        switch: creates the `DraftSwitch` that pauses drafting while it does not pay; None always drafts.

    Attributes (of the last answer):
        proposed, accepted: numbers of drafted tokens.
        drafted_passes: forward passes over a draft.
        undrafted_tokens: tokens generated without a draft.

    Raises `UserError` if `tokens` is out of range.
    """

    def __init__(
        self, drafter: Callable[[], Drafter], *, tokens: int = 4, switch: Callable[[], DraftSwitch] | None = None
    ) -> None:
        self.tokens = check_tokens(tokens)
        self._factories = drafter, switch
        self._drafter, self._switch = drafter(), switch and switch()
        self._clear()

    def copy(self) -> "Speculation":
        """A copy for another stream; it shares the draft model but not its cache."""
        drafter, switch = self._factories
        return Speculation(drafter, tokens=self.tokens, switch=switch)

    @property
    def acceptance(self) -> float:
        """The fraction of drafted tokens that were accepted, from 0 to 1; 0 if none were drafted."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def begin(
        self, ids: Sequence[int], cache: list[KVCache], new: int, *, chunk: int, on_chunk: Callable[[], None]
    ) -> None:
        """Start an answer to the context `ids`, whose last `new` tokens are not in `cache` yet.

        The other arguments are those of `Drafter.begin`.

        Raises:
            UserError: `ids` are not the whole context, or rejected tokens cannot be trimmed from the cache.
        """
        cached = cache[0].offset
        if cached + new != len(ids):
            raise UserError(f"a draft needs all ids before it: the cache holds {cached}, history has {len(ids) - new}")
        for layer in cache:
            if not hasattr(layer, "trim"):
                raise UserError(f"a draft needs a cache that can be trimmed, which {type(layer).__name__} cannot be")
        self._clear()
        self._drafter.begin(ids, chunk=chunk, on_chunk=on_chunk)
        if self._switch is not None:
            self._switch.begin()

    def decode(
        self,
        model: Transformer,
        logits: mx.array,
        cache: list[KVCache],
        sampler: Sampler,
        *,
        count: int,
        logprobs: int | None = None,
        capture: "NormCapture | None" = None,
    ) -> Iterator[TokenChoice]:
        """Yield `count` tokens as `decoding.decode` does, in fewer passes; call `begin` first.

        While nothing is drafted, two passes are in flight, as in `decode`. While drafting, the next draft and its pass
        are queued before the tokens of the current one are yielded. However it ends, the cache contains no more than
        the prompt and the yielded tokens.
        """
        passes = _Passes(model, cache, sampler, logprobs, capture)
        prompt, yielded = cache[0].offset, 0
        current, queue_ahead = passes.from_logits(logits), True
        try:
            while current is not None:
                more = queue_ahead and count - yielded > 1
                following = passes.over_token(current.choices[-1].token) if more else None
                tokens, accepted = passes.read(current)
                self.advance(tokens, current.drafted, accepted)
                left = count - yielded - len(tokens)
                queue_ahead = not self.ready()
                if following is None and left > 0:
                    following = passes.after(tokens[-1], self, 0 if queue_ahead else left - 1)
                for choice in current.choices[: len(tokens)]:
                    yielded += 1
                    yield choice
                current = following
        finally:
            for layer in cache:
                layer.trim(max(0, layer.offset - prompt - yielded))

    def ready(self) -> bool:
        """Whether the next tokens should be drafted."""
        return (self._switch is None or self._switch.on) and self._drafter.ready()

    def propose(self, limit: int, sampler: Sampler) -> mx.array:
        """A draft of the next tokens `(n,)`, 1 <= n <= `limit`."""
        return self._drafter.propose(min(self.tokens, limit), copy(sampler))

    def advance(self, tokens: list[int], proposed: int, accepted: int) -> None:
        """Count a pass that gave `tokens` and accepted the first `accepted` of `proposed` drafted ones."""
        self._drafter.advance(tokens, accepted)
        if self._switch is not None:
            self._switch.measure(len(tokens), drafted=proposed > 0)
        self.proposed += proposed
        self.accepted += accepted
        self.drafted_passes += proposed > 0
        self.undrafted_tokens += proposed == 0

    def _clear(self) -> None:
        self.proposed = self.accepted = self.drafted_passes = self.undrafted_tokens = 0


def check_tokens(tokens: int, name: str = "tokens") -> int:
    """Return `tokens`, a draft's length. Raises `UserError`, which calls it `name`, if it is out of range."""
    if not isinstance(tokens, int) or not 1 <= tokens <= MAX_DRAFT_TOKENS:
        raise UserError(f"{name} is {tokens}; it must be a whole number from 1 to {MAX_DRAFT_TOKENS}")
    return tokens


@dataclass(frozen=True)
class _Pass:
    """A queued forward pass, and the tokens sampled from it.

    Without a draft, `choices` is the one token after its last position. A pass over one known token and a `draft`
    `(n,)` has n + 1 `choices`, one after each position, and the state of the sampler after each as `samplers`.
    """

    choices: list[TokenChoice]
    draft: mx.array | None = None
    samplers: Sequence[Sampler] = ()

    @property
    def drafted(self) -> int:
        return 0 if self.draft is None else self.draft.size


class _Passes:
    """Makes the forward passes of one answer, which share a cache and a sampler."""

    def __init__(
        self,
        model: Transformer,
        cache: list[KVCache],
        sampler: Sampler,
        logprobs: int | None,
        capture: "NormCapture | None",
    ) -> None:
        self._model, self._cache, self._sampler = model, cache, sampler
        self._logprobs, self._capture = logprobs, capture

    def from_logits(self, logits: mx.array) -> _Pass:
        """The pass whose last logits are `logits` `(1, vocab)`."""
        return _Pass([choose(logits, self._sampler, self._logprobs, self._capture).start()])

    def over_token(self, token: mx.array) -> _Pass:
        """A pass over one token `(1,)`, which need not be evaluated yet."""
        return self.from_logits(self._forward(token)[:, -1])

    def after(self, token: int, speculation: Speculation, limit: int) -> _Pass:
        """A pass over a known token and a draft of at most `limit` more; limit 0: no draft."""
        known = mx.array([token], dtype=mx.uint32)
        limit = min(limit, self._cache[0].max_draft - 1)
        if limit <= 0:
            return self.over_token(known)
        return self._over_draft(known, speculation.propose(limit, self._sampler))

    def read(self, queued: _Pass) -> tuple[list[int], int]:
        """Wait for a pass; returns its valid tokens and how many drafted ones were accepted.

        The rejected tokens are trimmed from the cache.
        """
        tokens = [int(choice.token.item()) for choice in queued.choices]
        if queued.draft is None:
            return tokens, 0
        draft = queued.draft.tolist()
        accepted = next((n for n, token in enumerate(draft) if token != tokens[n]), len(draft))
        for layer in self._cache:
            layer.trim(len(draft) - accepted)
        self._sampler = queued.samplers[accepted]
        return tokens[: accepted + 1], accepted

    def _forward(self, tokens: mx.array) -> mx.array:
        return self._model(tokens[None], self._cache[0].offset, self._cache)  # (1, S, vocab)

    def _over_draft(self, known: mx.array, draft: mx.array) -> _Pass:
        logits = self._forward(mx.concatenate([known, draft]))
        captured = self._capture.take() if self._capture else []
        norms = [position for pending in captured for position in pending.positions()]
        choices, samplers = [], []
        for position in range(logits.shape[1]):
            choice = choose(logits[:, position], self._sampler, self._logprobs, None)
            choices.append(replace(choice, norms=norms[position : position + 1]))
            samplers.append(copy(self._sampler))
        mx.async_eval([choice.arrays() for choice in choices])
        return _Pass(choices, draft, samplers)
