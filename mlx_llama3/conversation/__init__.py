"""A multi-turn conversation with its cache, the saved conversation (JSON), and the prompt cache (safetensors).

A prompt cache identifies the model and the tokenizer that it was made with by their fingerprints.
"""

from mlx_llama3.conversation.conversation import ContextFull, Conversation, Turn
from mlx_llama3.conversation.saved import SavedConversation

__all__ = ["ContextFull", "Conversation", "SavedConversation", "Turn"]
