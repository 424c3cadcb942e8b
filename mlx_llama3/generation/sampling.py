"""Sampling: pure functions on logits, the options `Sampling`, and `Sampler`, the state of one stream.

The order is that of llama.cpp and mlx-lm: logit bias, penalties, then top_k, top_p and min_p on the distribution at
temperature 1, the temperature last. (transformers applies the temperature first, so its filters keep more tokens as the
temperature rises.) Each filter sees the renormalized distribution that the previous one left, as in llama.cpp.

Everything stays in the MLX graph: no function here waits for a value, so the next step can be queued before the current
token is known. NaN is not hidden: no filter removes one, and all log-probabilities of such a row are NaN.
"""

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mlx_llama3.errors import UserError

import mlx.core as mx

SMALLEST_FLOAT32 = 2.0**-126  # a smaller temperature is 0 on the device
LARGEST = 1e30  # limit of every option: multiplied by any token count or logit it is still finite in float32


@dataclass(frozen=True)
class Sampling:
    """Sampling options. The default is greedy decoding, with everything else off.

    temperature: 0 is the exact argmax (filters cannot change it; bias and penalties can).
    top_k: keep the k most probable tokens; 0 is off. Exactly k stay, even if tokens tie for the last place.
    top_p: keep the smallest set of most probable tokens whose probabilities sum to at least this (Holtzman et al.
        2019); 1 is off.
    min_p: keep tokens at least min_p times as probable as the best (Nguyen et al. 2024); 0 is off.
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al.
        2019, section 4.1, with the sign rule of transformers); 1 is off.
    presence_penalty, frequency_penalty: subtracted once, and once per occurrence, from the logits of generated tokens
        (OpenAI's definition; the prompt does not count); 0 is off.
    logit_bias: token id -> number added to its logit; -inf bans the token.
    seed: the same seed gives the same tokens, whatever else uses MLX's global generator; None takes fresh entropy.

    Raises `UserError`, one line that names the option and its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check("temperature", 0, LARGEST, f"a number from 0 (greedy) to {LARGEST}")
        self._check("top_k", 0, math.inf, "a whole number, 0 (off) or above", int)
        self._check("top_p", 0, 1, "a number from 0 to 1 (off)")
        self._check("min_p", 0, 1, "a number from 0 (off) to 1")
        self._check("repetition_penalty", 1 / LARGEST, LARGEST, f"a number above 0, up to {LARGEST} (1 is off)")
        self._check("presence_penalty", -LARGEST, LARGEST, f"a number from {-LARGEST} to {LARGEST} (0 is off)")
        self._check("frequency_penalty", -LARGEST, LARGEST, f"a number from {-LARGEST} to {LARGEST} (0 is off)")
        if self.seed is not None:
            self._check("seed", 0, 2**64 - 1, "a whole number from 0 to 2**64 - 1", int)
        for token, bias in self.logit_bias.items():
            in_range = _is(bias, float) and (bias == -math.inf or abs(bias) <= LARGEST)
            if not _is(token, int) or token < 0 or not in_range:
                raise UserError(
                    f"logit_bias {token}:{bias} must be a token id, 0 or above, and a number up to {LARGEST}, or -inf"
                )

    def _check(self, name: str, low: float, high: float, allowed: str, kind: type = float) -> None:
        value = getattr(self, name)
        if not (_is(value, kind) and low <= value <= high):
            raise UserError(f"{name} is {value}; it must be {allowed}")

    @property
    def greedy(self) -> bool:
        """Whether these options can only give the best token, so that an argmax is enough."""
        return self.temperature < SMALLEST_FLOAT32 or self.top_k == 1 or self.top_p == 0

    @property
    def penalizes(self) -> bool:
        """Whether any penalty is on, so that `Counts` are needed."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _is(value: object, kind: type) -> bool:
    """Whether `value` is a number of this kind: an int counts as a float, a bool as neither."""
    return isinstance(value, (int, kind)) and not isinstance(value, bool)


class Counts(NamedTuple):
    """Token counts of one stream, for the penalties; arrays, so that counting a token does not wait for its value.

    seen: (vocab,) bool, the token is in the prompt or the output. generated: (vocab,) int32, times it was generated.
    """

    seen: mx.array
    generated: mx.array

    @classmethod
    def of_prompt(cls, prompt: Iterable[int], vocab_size: int) -> "Counts":
        """Counts before the first generated token; `prompt` are the ids of the whole context."""
        seen = mx.zeros(vocab_size, dtype=mx.bool_)
        ids = sorted(set(prompt))
        if ids:
            seen[mx.array(ids)] = True
        return cls(seen, mx.zeros(vocab_size, dtype=mx.int32))

    def add(self, token: mx.array) -> "Counts":
        """Counts after `token` (1,) was generated."""
        seen = self.seen | (mx.arange(self.seen.size) == token)
        return Counts(seen, self.generated.at[token].add(1))


def penalize(logits: mx.array, counts: Counts, sampling: Sampling) -> mx.array:
    """Repetition, presence and frequency penalties on logits (..., vocab); same shape."""
    if sampling.repetition_penalty != 1:
        factor = sampling.repetition_penalty
        scaled = mx.where(logits > 0, logits / factor, logits * factor)
        logits = mx.where(counts.seen, scaled, logits)
    if sampling.presence_penalty:
        logits = logits - sampling.presence_penalty * (counts.generated > 0)
    if sampling.frequency_penalty:
        logits = logits - sampling.frequency_penalty * counts.generated
    return logits


def check_bias(bias: Mapping[int, float], vocab_size: int) -> None:
    """Raise `UserError` for an id outside the vocabulary."""
    if bias and max(bias) >= vocab_size:
        raise UserError(f"logit_bias names token {max(bias)}; the vocabulary ends at {vocab_size - 1}")


def add_bias(logits: mx.array, bias: Mapping[int, float]) -> mx.array:
    """`bias` added to logits (..., vocab). Raises `UserError` for an id outside the vocabulary."""
    check_bias(bias, logits.shape[-1])
    return logits.at[..., mx.array(list(bias))].add(mx.array(list(bias.values()), dtype=logits.dtype))


def top_k_ids(logits: mx.array, k: int) -> mx.array:
    """Ids (..., min(k, vocab)) of the k largest of logits (..., vocab), unsorted. NaN counts as largest."""
    vocab_size = logits.shape[-1]
    if k >= vocab_size:
        return mx.broadcast_to(mx.arange(vocab_size), logits.shape)
    return mx.argpartition(logits, vocab_size - k, axis=-1)[..., vocab_size - k :]


def keep_top_p(logits: mx.array, p: float) -> mx.array:
    """Logits (..., n) with -inf outside the smallest set of best entries whose probabilities sum to at least p.

    The best entry always stays. Of equal entries at the border, those of lower index stay.
    """
    order = mx.argsort(-logits, axis=-1)
    probabilities = mx.softmax(mx.take_along_axis(logits, order, axis=-1), axis=-1, precise=True)
    before = mx.cumsum(probabilities, axis=-1, inclusive=False)  # total probability of the better entries
    remove = (before >= p) & (mx.arange(logits.shape[-1]) > 0)
    remove = mx.put_along_axis(mx.zeros_like(remove), order, remove, axis=-1)
    return mx.where(remove, -mx.inf, logits)


def keep_min_p(logits: mx.array, p: float) -> mx.array:
    """Logits (..., n) with -inf where the probability is below p (0 < p <= 1) times that of the best entry."""
    floor = logits.max(axis=-1, keepdims=True) + math.log(p)
    return mx.where(logits < floor, -mx.inf, logits)


def draw(logits: mx.array, sampling: Sampling, key: mx.array) -> mx.array:
    """Ids (...,) drawn from logits (..., vocab) after top_k, top_p, min_p and the temperature, in this order.

    Uses the Gumbel-max trick. The noise belongs to the token's id, whatever the filters leave, so two models with
    similar distributions that draw with the same key mostly draw the same token. This lets one draft for the other
    (Daliri et al. 2024, arXiv 2408.07978).
    """
    logits = logits.astype(mx.float32)
    noise = mx.random.gumbel(logits.shape, key=key)
    candidates = None
    if 0 < sampling.top_k < logits.shape[-1]:
        # Gather the k entries first, so that top_p need not sort the whole vocabulary.
        candidates = top_k_ids(logits, sampling.top_k)
        logits = mx.take_along_axis(logits, candidates, axis=-1)
        noise = mx.take_along_axis(noise, candidates, axis=-1)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p > 0:
        logits = keep_min_p(logits, sampling.min_p)
    # Subtracting the maximum makes the best entry 0, which no temperature, however small, can make overflow.
    logits = (logits - logits.max(axis=-1, keepdims=True)) / sampling.temperature
    drawn = mx.argmax(logits + noise, axis=-1)
    if candidates is None:
        return drawn
    return mx.take_along_axis(candidates, drawn[..., None], axis=-1).squeeze(-1)


def sample(
    logits: mx.array, sampling: Sampling, key: mx.array | None = None, counts: Counts | None = None
) -> tuple[mx.array, mx.array]:
    """The next token and the log-probabilities, both not evaluated.

    logits: (vocab,) or (B, vocab), any float dtype. key: required unless `sampling.greedy`. counts: required if
    `sampling.penalizes`. Returns ids () or (B,) uint32, and the log-softmax of the raw logits, before bias, penalties
    and filters, float32 in the shape of the logits; it costs nothing unless it is evaluated.
    """
    logprobs = log_softmax(logits)
    if sampling.logit_bias or sampling.penalizes:
        logits = logits.astype(mx.float32)  # bias and penalties could overflow float16
    if sampling.logit_bias:
        logits = add_bias(logits, sampling.logit_bias)
    if sampling.penalizes:
        logits = penalize(logits, counts, sampling)
    return mx.argmax(logits, axis=-1) if sampling.greedy else draw(logits, sampling, key), logprobs


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities (..., vocab) in float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def top_logprobs(logprobs: mx.array, n: int) -> tuple[mx.array, mx.array]:
    """The n best of logprobs (..., vocab), best first: ids (..., n) and their log-probabilities (..., n)."""
    ids = top_k_ids(logprobs, n)
    values = mx.take_along_axis(logprobs, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1)


class Sampler:
    """The sampling state of one stream: its options, its own random key, and its counts.

    prompt: the ids of the whole context, read by the repetition penalty only. A call takes logits (1, vocab), returns
    what `sample` returns, and counts the token as generated.
    """

    def __init__(self, sampling: Sampling, vocab_size: int, prompt: Iterable[int] = ()) -> None:
        self.sampling = sampling
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._key = None if sampling.greedy else mx.random.key(seed)
        self._counts = Counts.of_prompt(prompt, vocab_size) if sampling.penalizes else None

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Next token (1,) and log-probabilities (1, vocab) of logits (1, vocab)."""
        key = None
        if self._key is not None:
            self._key, key = mx.random.split(self._key)
        token, logprobs = sample(logits, self.sampling, key, self._counts)
        if self._counts is not None:
            self._counts = self._counts.add(token)
        return token, logprobs
