"""Turns any error into a sentence for the page; the app continues after every one."""

import logging

from mlx_llama3.errors import UserError

log = logging.getLogger(__name__)


def explained(error: Exception) -> str:
    """The sentence for an error. Any error but `UserError` and its traceback are also logged in the terminal."""
    if isinstance(error, UserError):
        return str(error)
    log.error("while answering a request of the page", exc_info=error)
    if isinstance(error, MemoryError) or "alloc" in str(error):
        return "The memory does not suffice for this: use a shorter conversation, or a smaller model."
    return f"Something failed inside ({type(error).__name__}: {error}); the terminal shows where. You can go on."
