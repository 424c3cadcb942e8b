"""The logit lens: what the model would say if it stopped at each layer (nostalgebraist 2020, "interpreting GPT").

`output(norm(h))`, with the final norm's statistics taken anew from the state `h`; at the last layer it is the model's
own prediction.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_llama3.sampling import log_softmax, top_logprobs
from mlx_llama3.trace.position import Position

# After which branch a state is read, in the order of the axis.
AFTER = ("attention", "mlp")


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
    rows = []
    for mid, post in zip(position.states["resid_mid"], position.states["resid_post"], strict=True):
        logprobs = log_softmax(
            position.model.head(mx.stack([mid, post]))
        )  # (2, vocab): a layer at a time bounds memory
        chosen = logprobs[:, target : target + 1]
        rank = (logprobs > chosen).sum(-1)
        entropy = -(mx.exp(logprobs) * mx.maximum(logprobs, -1e4)).sum(-1)
        row = (*top_logprobs(logprobs, k), rank, chosen[:, 0], entropy)
        mx.eval(row)
        rows.append([np.array(part) for part in row])
    return Lens(*(np.stack(column) for column in zip(*rows, strict=True)))
