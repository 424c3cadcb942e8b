"""The system prefix: the ids that every prompt begins with, of the system prompt and the user message's header."""

from dataclasses import replace

from mlx_llama3.errors import UserError
from mlx_llama3.model.cache.prefix import common_length
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.tokenizer.tokenizer import Tokenizer


def system_prefix(tokenizer: Tokenizer, system: str | None) -> list[int]:
    """The ids that every chat with this system prompt begins with, including a template's default system prompt.

    Raises `PromptError` as `Tokenizer.encode_chat` does.
    """
    before = [{"role": "system", "content": system}] if system else []
    first, second = (tokenizer.encode_chat([*before, {"role": "user", "content": text}]) for text in "?!")
    return first[: common_length(first, second)]


def keep_system_prefix(settings: CacheSettings, tokenizer: Tokenizer, system: str | None) -> CacheSettings:
    """`settings` with `kv_keep` raised to the length of the system prefix, so that a window always keeps it.

    Raises `UserError` if the window is too small for it.
    """
    if settings.max_kv_size is None:
        return settings
    length = len(system_prefix(tokenizer, system))
    if length >= settings.max_kv_size:
        raise UserError(
            f"the system prompt takes {length} tokens, and the cache holds {settings.max_kv_size}; shorten the prompt, "
            "or enlarge the cache"
        )
    return replace(settings, kv_keep=max(length, settings.kv_keep))
