"""Text to token ids and back, and chat messages to prompts.

`vocabulary/` reads the files in which tokenizers travel; a chat format turns messages into ids.
"""

from mlx_llama3.tokenizer.detokenizer import Detokenizer
from mlx_llama3.tokenizer.messages import Message, PromptError
from mlx_llama3.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "Message", "PromptError", "Tokenizer", "load_tokenizer"]
