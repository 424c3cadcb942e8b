"""`load`: a model and its tokenizer by name. `load_draft`: a drafter for speculative decoding."""

from pathlib import Path

from mlx_llama3.autotune.choice import requested_kernels, use_chosen
from mlx_llama3.checkpoint.folder import read_settings
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.generation.speculative.draft_switch import DraftSwitch
from mlx_llama3.generation.speculative.drafters import ModelDrafter, NgramDrafter
from mlx_llama3.generation.speculative.speculation import Speculation, check_tokens
from mlx_llama3.generation.speculative.vocabulary_match import check_same_tokens
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.system.hub import resolve
from mlx_llama3.system.memory import hold_wired
from mlx_llama3.tokenizer.tokenizer import Tokenizer, load_tokenizer

import mlx.core as mx

NGRAM = "ngram"


def load(name: str, *, dtype: mx.Dtype | None = None) -> tuple[Transformer, Tokenizer]:
    """Load a model and its tokenizer.

    Args:
        name: a folder, a Hugging Face id ("org/name", downloaded on first use), or an alias: "demo", "llama3.2-1b",
            "llama3.2-3b", "llama3.1-8b", "llama3.3-70b".
        dtype: as in `load_model`.

    Raises:
        UserError: the model does not exist, cannot be downloaded, or cannot be loaded. The message is one line that
            says what to do.
    """
    return load_folder(resolve(name), dtype=dtype)


def load_folder(folder: Path, *, dtype: mx.Dtype | None = None) -> tuple[Transformer, Tokenizer]:
    """As `load`, for an existing folder. The quick checks run first, so that they fail before gigabytes are read."""
    requested_kernels()
    read_settings(folder)  # gives the best message for a folder that holds no model
    tokenizer = load_tokenizer(folder)
    return _ready(load_model(folder, dtype=dtype)), tokenizer


def _ready(model: Transformer) -> Transformer:
    """Prepare a model to run on this machine: wire its memory and choose its kernels."""
    hold_wired(model)
    use_chosen(model)
    return model


def load_draft(name: str, model: Transformer, tokenizer: Tokenizer, *, tokens: int | None = None) -> Speculation:
    """The drafter for speculative decoding; pass it to `generate` or `Conversation` as `draft`. One per conversation.

    Args:
        name: a smaller model with the same tokenizer, named as for `load`; or "ngram" (prompt lookup), which needs no
            model: it proposes what followed an earlier occurrence of the last tokens. That pays in summaries, edited
            code and quotes.
        model, tokenizer: the target model and its tokenizer.
        tokens: the most tokens to draft at a time. None means 4 for a model, and 6 for ngram, whose drafts are free.

    Raises:
        UserError: as for `load`; the tokenizers differ (checked before the draft model is loaded); `tokens` is out of
            range.
    """
    return ngram_draft(tokens) if name == NGRAM else load_draft_folder(resolve(name), model, tokenizer, tokens=tokens)


def ngram_draft(tokens: int | None = None) -> Speculation:
    """As `load_draft` for "ngram"."""
    return Speculation(NgramDrafter, tokens=6 if tokens is None else tokens, switch=DraftSwitch)


def load_draft_folder(
    folder: Path, model: Transformer, tokenizer: Tokenizer, *, tokens: int | None = None
) -> Speculation:
    """As `load_draft`, for an existing folder."""
    tokens = check_tokens(4 if tokens is None else tokens)
    read_settings(folder)
    check_same_tokens(load_tokenizer(folder), tokenizer, str(folder))
    draft_model = _ready(load_model(folder))
    return Speculation(lambda: ModelDrafter(draft_model, model.args.vocab_size), tokens=tokens, switch=DraftSwitch)
