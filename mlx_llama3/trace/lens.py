"""The logit lens: what the model would say if it stopped at each layer (nostalgebraist 2020, "interpreting GPT").

`output(norm(h))`, with the final norm's statistics taken anew from the state `h`; at the last layer it is the model's
own prediction.
"""

from dataclasses import dataclass

import numpy as np

from mlx_llama3.generation.sampling import log_softmax, top_logprobs
from mlx_llama3.trace.position import Position

import mlx.core as mx

# After which branch a state is read, in the order of the axis.
AFTER = ("attention", "mlp")
LAYERS_AT_A_TIME = 8


@dataclass(frozen=True)
class Lens:
    """The predictions at one position, after attention and after MLP of each layer (axis 1, as `AFTER`).

    ids, logprobs: `(n_layers, 2, k)`, best first; natural logarithms. rank: `(n_layers, 2)`, the place of the asked
    token, 0 is the best; target_logprob beside it. entropy: `(n_layers, 2)` in nats.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    rank: np.ndarray
    target_logprob: np.ndarray
    entropy: np.ndarray


def logit_lens(position: Position, target: int, *, k: int = 5) -> Lens:
    """The lens at every layer of `position`, and where the token `target` stands in it."""
    both = mx.stack([position.states["resid_mid"], position.states["resid_post"]], axis=1)  # (n_layers, 2, dim)
    parts = []
    # Several layers share a read of the head's matrix; not all of them, for each takes two rows of the vocabulary.
    for start in range(0, both.shape[0], LAYERS_AT_A_TIME):
        logprobs = log_softmax(position.model.head(both[start : start + LAYERS_AT_A_TIME]))  # (layers, 2, vocab)
        chosen = logprobs[..., target : target + 1]
        rank = (logprobs > chosen).sum(-1)
        entropy = -(mx.exp(logprobs) * mx.maximum(logprobs, -1e4)).sum(-1)
        part = (*top_logprobs(logprobs, k), rank, chosen[..., 0], entropy)
        mx.eval(part)
        parts.append([np.asarray(each) for each in part])
    return Lens(*(np.concatenate(column) for column in zip(*parts, strict=True)))
