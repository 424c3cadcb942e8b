"""The logit lens: the model's prediction from the residual stream of each layer (nostalgebraist 2020, "interpreting
GPT").

It is `output(norm(h))`, where the final norm is computed from the state `h`; at the last layer this is the model's own
prediction.
"""

from dataclasses import dataclass

import numpy as np

from mlx_llama3.generation.sampling import log_softmax, top_logprobs
from mlx_llama3.trace.position import Position

import mlx.core as mx

AFTER = ("attention", "mlp")  # axis 1 of a `Lens`: the branch after which the stream is read
LAYERS_AT_A_TIME = 8


@dataclass(frozen=True)
class Lens:
    """The predictions at one position, after attention and after MLP of each layer (axis 1, see `AFTER`).

    ids, logprobs: `(n_layers, 2, k)`, best first; natural logarithms. rank: `(n_layers, 2)`, that of the target token,
    0 is the best. target_logprob: `(n_layers, 2)`. entropy: `(n_layers, 2)` in nats.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    rank: np.ndarray
    target_logprob: np.ndarray
    entropy: np.ndarray


def logit_lens(position: Position, target: int, *, k: int = 5) -> Lens:
    """The lens at every layer of `position`, with the rank and log-probability of the token `target`."""
    both = mx.stack([position.states["resid_mid"], position.states["resid_post"]], axis=1)  # (n_layers, 2, dim)
    chunks = []
    # Several layers at a time read the head's matrix once; all at once would need 2 * n_layers * vocab logits.
    for start in range(0, both.shape[0], LAYERS_AT_A_TIME):
        logprobs = log_softmax(position.model.head(both[start : start + LAYERS_AT_A_TIME]))  # (layers, 2, vocab)
        target_logprob = logprobs[..., target : target + 1]
        rank = (logprobs > target_logprob).sum(-1)
        entropy = -(mx.exp(logprobs) * mx.maximum(logprobs, -1e4)).sum(-1)
        columns = (*top_logprobs(logprobs, k), rank, target_logprob[..., 0], entropy)
        mx.eval(columns)
        chunks.append([np.asarray(column) for column in columns])
    return Lens(*(np.concatenate(column) for column in zip(*chunks, strict=True)))
