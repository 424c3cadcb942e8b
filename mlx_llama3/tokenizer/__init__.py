"""The tokenizer: encodes and decodes text, and turns chat messages into prompts.

`vocabulary/` reads the file formats of tokenizers; a chat format turns messages into ids.
"""

from mlx_llama3.tokenizer.detokenizer import Detokenizer
from mlx_llama3.tokenizer.messages import Message, PromptError
from mlx_llama3.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "Message", "PromptError", "Tokenizer", "load_tokenizer"]
