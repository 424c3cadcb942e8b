"""From a prompt's ids to the tokens that follow: sampling, the decoding loop, the text stream, batches.

`speculative/` drafts tokens and checks several in one pass.
"""

from mlx_llama3.generation.batch import Answer, Request, generate_batch
from mlx_llama3.generation.decoding import decode, prefill
from mlx_llama3.generation.sampling import Sampler, Sampling
from mlx_llama3.generation.stream import Step, generate

__all__ = [
    "Answer",
    "Request",
    "Sampler",
    "Sampling",
    "Step",
    "decode",
    "generate",
    "generate_batch",
    "prefill",
]
