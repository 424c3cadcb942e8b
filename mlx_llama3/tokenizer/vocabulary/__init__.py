"""`Vocabulary`: the tokens of a model, from `tokenizer.json`, Meta's `tokenizer.model`, or a GGUF's metadata.

All three give bytes and ranks for tiktoken, a pre-tokenizer, and the added tokens.
"""

from mlx_llama3.tokenizer.vocabulary.vocabulary import Vocabulary

__all__ = ["Vocabulary"]
