"""The tokens of a model, read from `tokenizer.json`, from Meta's `tokenizer.model`, or from a GGUF's metadata.

All three become one `Vocabulary`: bytes and ranks for tiktoken, a pre-tokenizer, and the added tokens.
"""

from mlx_llama3.tokenizer.vocabulary.vocabulary import Vocabulary

__all__ = ["Vocabulary"]
