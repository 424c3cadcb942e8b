"""What stands at the start of every prompt: the system prompt and the header of the user's message."""

from dataclasses import replace

from mlx_llama3.errors import UserError
from mlx_llama3.model.cache.prefix import common_length
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.tokenizer.tokenizer import Tokenizer


def prompt_head(tokenizer: Tokenizer, system: str | None) -> list[int]:
    """The ids with which every chat under this system prompt begins, one that the template brings along included.

    Raises `PromptError` as `Tokenizer.encode_chat` does.
    """
    before = [{"role": "system", "content": system}] if system else []
    first, second = (tokenizer.encode_chat([*before, {"role": "user", "content": text}]) for text in "?!")
    return first[: common_length(first, second)]


def keep_head(settings: CacheSettings, tokenizer: Tokenizer, system: str | None) -> CacheSettings:
    """`settings`, with a window (if they ask for one) that never loses the system prompt.

    Raises `UserError` if the window is too small for it.
    """
    if settings.max_kv_size is None:
        return settings
    head = len(prompt_head(tokenizer, system))
    if head >= settings.max_kv_size:
        raise UserError(
            f"the system prompt takes {head} tokens, and the cache holds {settings.max_kv_size}; shorten the one, "
            "or have the other hold more"
        )
    return replace(settings, kv_keep=max(head, settings.kv_keep))
