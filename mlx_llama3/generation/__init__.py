"""Generation: sampling, the decoding loop, the text stream, and batches of prompts.

`speculative/` drafts tokens and verifies several in one forward pass.
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
