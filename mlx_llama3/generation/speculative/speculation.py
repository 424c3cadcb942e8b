"""Speculative decoding: a draft of the next tokens is checked in one pass of the model (Leviathan et al. 2023, arXiv
2211.17192; Chen et al. 2023, arXiv 2302.01318).

What comes out does not depend on the drafts. The token after each drafted position is chosen as it is without drafts,
with the noise of that position (a seed's keys are one a token) and the penalties of the tokens before it, and a draft
is kept as far as it guessed these tokens. So a sampled answer has the model's own distribution, and the same seed gives
the same answer with any drafter, or none, and wherever drafting is switched off. Of a guess that is certain, as prompt
lookup makes them, this keeps as many as the rejection rule of the papers; a draft model draws with the same noise, a
coupling that keeps nearly as many (Daliri et al. 2024, arXiv 2408.07978) and, unlike that rule, needs no draws of its
own.

One limit: a pass over several positions rounds differently from passes over one, by some 1e-5 of a logit in float32.
Where two tokens are closer than that, the answer may turn out the other way, as it may with another `prefill_chunk`. An
exact tie goes to the lower id, as always.
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

MOST_TOKENS = 32  # of a draft; what is more costs a full matrix product


class Speculation:
    """How answers of one stream are drafted: give it to `generate` or to a `Conversation`, answer after answer.

    drafter: makes the one who guesses. tokens: at most so many in one draft. switch: makes the one who says when
    drafting pays; None drafts always.

    Of the last answer: `proposed` and `accepted` are drafted tokens, `passes` those of the model over a draft, `plain`
    the tokens that came without one.
    Raises `UserError` for a number of tokens out of range.
    """

    def __init__(
        self, drafter: Callable[[], Drafter], *, tokens: int = 4, switch: Callable[[], DraftSwitch] | None = None
    ) -> None:
        self.tokens = check_tokens(tokens)
        self._parts = drafter, switch
        self._drafter, self._switch = drafter(), switch and switch()
        self._clear()

    def copy(self) -> "Speculation":
        """The same for another stream; a draft model is shared, not its cache."""
        drafter, switch = self._parts
        return Speculation(drafter, tokens=self.tokens, switch=switch)

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that were right, from 0 to 1; 0 where none was drafted."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def begin(
        self, ids: Sequence[int], cache: list[KVCache], new: int, *, chunk: int, on_chunk: Callable[[], None]
    ) -> None:
        """An answer to the context `ids` begins, whose last `new` tokens are not in `cache` yet; the rest as for
        `Drafter.begin`.

        Raises:
            UserError: `ids` are not the whole context, or the cache cannot forget what was drafted in vain.
        """
        held = cache[0].offset
        if held + new != len(ids):
            raise UserError(f"a draft needs all ids before it: the cache holds {held}, history has {len(ids) - new}")
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
        """`count` choices as `decoding.decode` makes them, in fewer passes; `begin` comes before.

        Where nothing is drafted, two passes are in flight as there. Where something is, the next draft and its pass are
        queued before the tokens of this one are handed out. However it ends, the cache holds no more than the prompt
        and the tokens that were handed out.
        """
        passes = _Passes(model, cache, sampler, logprobs, capture)
        prompt, given = cache[0].offset, 0
        current, ahead = passes.of_prompt(logits), True
        try:
            while current is not None:
                following = passes.plain(current.choices[-1].token) if ahead and count - given > 1 else None
                tokens, accepted = passes.read(current)
                self.advance(tokens, current.drafted, accepted)
                left = count - given - len(tokens)
                ahead = not self.ready()
                if following is None and left > 0:
                    following = passes.after(tokens[-1], self, 0 if ahead else left - 1)
                for choice in current.choices[: len(tokens)]:
                    given += 1
                    yield choice
                current = following
        finally:
            for layer in cache:
                layer.trim(max(0, layer.offset - prompt - given))

    def ready(self) -> bool:
        """Whether the next tokens should be drafted."""
        return (self._switch is None or self._switch.on) and self._drafter.ready()

    def propose(self, most: int, sampler: Sampler) -> mx.array:
        """The next tokens `(n,)`, at most so many, which must be 1 at least."""
        return self._drafter.propose(min(self.tokens, most), copy(sampler))

    def advance(self, tokens: list[int], proposed: int, accepted: int) -> None:
        """A pass was read; it gave `tokens`, of which the first `accepted` of `proposed` were drafted."""
        self._drafter.advance(tokens, accepted)
        if self._switch is not None:
            self._switch.measure(len(tokens), drafted=proposed > 0)
        self.proposed += proposed
        self.accepted += accepted
        self.passes += proposed > 0
        self.plain += proposed == 0

    def _clear(self) -> None:
        self.proposed = self.accepted = self.passes = self.plain = 0


def check_tokens(tokens: int, name: str = "tokens") -> int:
    """`tokens`, at most so many of which are drafted at a time.

    Raises `UserError` for a number out of range; `name` is what it calls it.
    """
    if not isinstance(tokens, int) or not 1 <= tokens <= MOST_TOKENS:
        raise UserError(f"{name} is {tokens}; it must be a whole number from 1 to {MOST_TOKENS}")
    return tokens


@dataclass(frozen=True)
class _Pass:
    """A pass that is queued, and the choice after its last position.

    Over a `draft` `(n,)`, which follows one known token: `choices` after all of its positions, and `samplers`, the
    states of the sampler after each.
    """

    choices: list[TokenChoice]
    draft: mx.array | None = None
    samplers: Sequence[Sampler] = ()

    @property
    def drafted(self) -> int:
        return 0 if self.draft is None else self.draft.size


class _Passes:
    """The passes of one answer, over the cache and with the sampler that they share."""

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

    def of_prompt(self, logits: mx.array) -> _Pass:
        """The pass, queued already, that gave logits `(1, vocab)`."""
        return _Pass([choose(logits, self._sampler, self._logprobs, self._capture).start()])

    def plain(self, token: mx.array) -> _Pass:
        """A pass over one token `(1,)`, which need not be known yet."""
        return self.of_prompt(self._feed(token)[:, -1])

    def after(self, token: int, speculation: Speculation, most: int) -> _Pass:
        """A pass over a token that is known and, if `most` is not 0, a draft of so many more at most."""
        known = mx.array([token], dtype=mx.uint32)
        most = min(most, self._cache[0].max_draft - 1)
        return self._over_draft(known, speculation.propose(most, self._sampler)) if most > 0 else self.plain(known)

    def read(self, done: _Pass) -> tuple[list[int], int]:
        """The tokens that a pass gave, and how many of them were drafted; waits. The cache keeps what was right."""
        tokens = [choice.token.item() for choice in done.choices]
        if done.draft is None:
            return tokens, 0
        draft = done.draft.tolist()
        accepted = next((n for n, token in enumerate(draft) if token != tokens[n]), len(draft))
        for layer in self._cache:
            layer.trim(len(draft) - accepted)
        self._sampler = done.samplers[accepted]
        return tokens[: accepted + 1], accepted

    def _feed(self, tokens: mx.array) -> mx.array:
        return self._model(tokens[None], self._cache[0].offset, self._cache)  # (1, S, vocab)

    def _over_draft(self, known: mx.array, draft: mx.array) -> _Pass:
        logits = self._feed(mx.concatenate([known, draft]))
        norms = [norms for each in (self._capture.take() if self._capture else []) for norms in each.positions()]
        choices, samplers = [], []
        for place in range(logits.shape[1]):
            choice = choose(logits[:, place], self._sampler, self._logprobs, None)
            choices.append(replace(choice, norms=norms[place : place + 1]))
            samplers.append(copy(self._sampler))
        mx.async_eval([choice.arrays() for choice in choices])
        return _Pass(choices, draft, samplers)
