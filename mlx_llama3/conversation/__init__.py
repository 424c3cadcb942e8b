"""A conversation of many turns with its cache, and what can be kept of it in a file.

A file names the model and tokenizer it was made with by their fingerprints.
"""

from mlx_llama3.conversation.conversation import ContextFull, Conversation, Turn
from mlx_llama3.conversation.saved import SavedConversation

__all__ = ["ContextFull", "Conversation", "SavedConversation", "Turn"]
